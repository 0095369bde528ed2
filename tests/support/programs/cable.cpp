// A cable that loses and delays what it carries, between two TAP devices of this machine:
//     cable DEVICE DEVICE LOSS DELAY JITTER [RATE]
// LOSS is a share, DELAY and JITTER are milliseconds each way. Frames may overtake each other, as
// the jitter wants. RATE is megabits a second each way, 0 for no limit: a frame leaves after those
// before it, and one that would wait longer than QUEUE is lost. Says "ready" once both devices are
// there; they go with the process. After SIGUSR1
// it says how many frames were lost by LOSS, and how many had to wait for RATE.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>

static const double QUEUE = 100;  // milliseconds

static volatile sig_atomic_t asked = 0;
static void ask(int) { asked = 1; }

static double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

static int device(const char* name) {
  const int file = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (file < 0 || ioctl(file, TUNSETIFF, &request) != 0) {
    perror(name);
    exit(1);
  }
  return file;
}

int main(int count, char** words) {
  const int ends[2] = {device(words[1]), device(words[2])};
  const double loss = atof(words[3]), delay = atof(words[4]), jitter = atof(words[5]);
  const double rate = words[6] == nullptr ? 0 : atof(words[6]);
  double free_at[2] = {0, 0};  // when the cable has sent all that entered at an end
  std::mt19937 draw(1);
  std::uniform_real_distribution<double> share(0, 1);
  std::multimap<double, std::pair<int, std::string>> under_way;  // by arrival: end, frame
  long lost = 0, waited = 0;
  signal(SIGUSR1, ask);
  puts("ready");
  fflush(stdout);
  static char frame[1 << 16];
  for (;;) {
    pollfd files[2] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}};
    int wait = 100;  // SIGUSR1 may have come before
    if (!under_way.empty()) {
      const double left = under_way.begin()->first - now();
      wait = left <= 0 ? 0 : std::min(wait, static_cast<int>(left) + 1);
    }
    if (poll(files, 2, wait) < 0) files[0].revents = files[1].revents = 0;
    if (asked) {
      asked = 0;
      printf("%ld %ld\n", lost, waited);
      fflush(stdout);
    }
    for (int end = 0; end < 2; ++end) {
      ssize_t size;
      while ((size = read(ends[end], frame, sizeof frame)) > 0)
        if (share(draw) < loss) {
          ++lost;
        } else {
          double leaves = now();
          if (rate > 0) {
            if (free_at[end] > leaves + QUEUE) continue;
            if (free_at[end] > leaves) ++waited, leaves = free_at[end];
            leaves = free_at[end] = leaves + static_cast<double>(size) * 8e-3 / rate;
          }
          under_way.emplace(leaves + delay + jitter * share(draw),
                            std::make_pair(1 - end, std::string(frame, size)));
        }
    }
    while (!under_way.empty() && under_way.begin()->first <= now()) {
      const auto& [end, bytes] = under_way.begin()->second;
      if (write(ends[end], bytes.data(), bytes.size()) < 0) {
      }  // a full queue loses it
      under_way.erase(under_way.begin());
    }
  }
}
