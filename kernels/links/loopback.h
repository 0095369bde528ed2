// An mpirun that listens on the loopback alone: PRRTE 3.0 has no setting for this. `ecrm launch`
// preloads the library into mpirun. There, and nowhere else, this `bind` comes before that of the
// system: a program that loads the library later keeps the system's.
#pragma once

#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <string>

#include "native.h"

namespace ecrm::links {

// Takes the first library out of LD_PRELOAD, in the program that starts the ranks: ranks and their
// processes are as without this library.
__attribute__((constructor)) inline void leave_no_trace() {
  const char* preloaded = getenv("LD_PRELOAD");
  if (strcmp(program_invocation_short_name, "prterun") != 0 || preloaded == nullptr) return;
  const std::string all = preloaded;
  const size_t end = all.find(':');
  if (all.substr(0, end).find("_native.so") == std::string::npos) return;
  if (end == std::string::npos)
    unsetenv("LD_PRELOAD");
  else
    setenv("LD_PRELOAD", all.substr(end + 1).c_str(), 1);
}

}  // namespace ecrm::links

// As bind(2), with the loopback in place of all addresses.
ECRM_ENTRY int bind(int socket, const sockaddr* address, socklen_t size) noexcept {
  static const auto next = reinterpret_cast<decltype(&::bind)>(dlsym(RTLD_NEXT, "bind"));
  if (address->sa_family == AF_INET && size >= sizeof(sockaddr_in)) {
    sockaddr_in here;
    memcpy(&here, address, sizeof here);
    if (here.sin_addr.s_addr == htonl(INADDR_ANY)) {
      here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      return next(socket, reinterpret_cast<const sockaddr*>(&here), sizeof here);
    }
  }
  if (address->sa_family == AF_INET6 && size >= sizeof(sockaddr_in6)) {
    sockaddr_in6 here;
    memcpy(&here, address, sizeof here);
    if (IN6_IS_ADDR_UNSPECIFIED(&here.sin6_addr)) {
      here.sin6_addr = in6addr_loopback;
      return next(socket, reinterpret_cast<const sockaddr*>(&here), sizeof here);
    }
  }
  return next(socket, address, size);
}
