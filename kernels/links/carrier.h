// The carrier: the links of one rank over sockets, with a thread for times without a call.
//
// A call makes progress by itself, under the lock. Where no call has made any for kIdle seconds, as
// a rank computes, the thread does. So a rank that computes is no rank that is away.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "links/link.h"

namespace ecrm {
namespace links {

constexpr double kIdle = 0.02;
constexpr double kPause = 0.1;          // of the listener, without a file for a connection
constexpr size_t kPassBytes = 8 << 20;  // that a link reads or writes before others have a turn
constexpr int kPassItems = 256;         // connections to accept, or beats to hear
constexpr size_t kMostStrangers = 64;  // connections without a proof, or as many as ranks if more
constexpr double kLeaseShare = 0.8;    // of the keep-alive time: the head waits for longer
constexpr double kBeatShare = 0.05;
constexpr double kLongestBeat = 0.5;

// A sign of life of a rank to the head, and the head's answer; a proof follows each.
struct Beat {
  uint64_t magic;
  uint8_t run[kRunBytes];
  uint64_t kind, rank, number;
  uint64_t news;  // in answers: the number of the head's state, larger after every change;
                  // in beats: 1 from the first epoch of the rank on
};
static_assert(sizeof(Beat) == 56, "without gaps");
constexpr uint64_t kBeatMagic = 0x3174616562726365;  // "ecrbeat1"
enum BeatKind : uint64_t { kBeats = 1, kAnswers = 2 };

inline double clock_now(clockid_t clock = CLOCK_MONOTONIC) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// The clock of leases: it goes on while this host is suspended, as time does at the head.
inline double lease_now() { return clock_now(CLOCK_BOOTTIME); }

// What a rank may do for as long: it is renewed by answers of the head. Without I/O.
class Lease {
 public:
  // Beats of a rank that has `begun` say so: from the first on the head counts the rank as dead
  // after a keep-alive time.
  Lease(double keep_alive, double now, uint64_t last, bool begun)
      : patience_(kLeaseShare * keep_alive),
        pause_(std::min(kBeatShare * keep_alive, kLongestBeat)),
        known_(now),
        number_(last),
        begun_(begun) {}
  uint64_t number() const { return number_; }
  bool begun() const { return begun_; }
  bool answered() const { return answered_; }
  // The number of a beat to send; 0: none is due.
  uint64_t beat(double now) {
    if (now < due_) return 0;
    due_ = now + pause_;
    sent_[++number_] = now;
    return number_;
  }
  // The head has answered: it has heard from this rank after the beat was sent.
  void heard(uint64_t number) {
    const auto at = sent_.find(number);
    if (at == sent_.end()) return;
    known_ = std::max(known_, at->second);
    answered_ = true;
    sent_.erase(sent_.begin(), std::next(at));
  }
  bool expired(double now) const { return now > known_ + patience_; }

 private:
  double patience_, pause_, known_, due_ = 0;
  uint64_t number_;
  bool begun_, answered_ = false;
  std::map<uint64_t, double> sent_;
};

class Carrier {
 public:
  // Listens on an address; `port()` is 0 where that failed, with errno.
  Carrier(const Identity& me, uint32_t world, const Settings& settings, const char* address)
      : me_(me), settings_(settings), ends_(world), strangers_(std::max<size_t>(kMostStrangers, world)) {
    for (uint32_t peer = 0; peer < world; ++peer)
      if (peer != me.rank) ends_[peer].link.reset(new Link(me_, peer, settings_));
    own_.sin_family = AF_INET;
    if (inet_pton(AF_INET, address, &own_.sin_addr) != 1) {
      errno = EINVAL;
      return;
    }
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    poll_ = epoll_create1(EPOLL_CLOEXEC);
    if (listener_ < 0 || poll_ < 0 || bind(listener_, address_of(own_), sizeof own_) != 0 ||
        listen(listener_, 4096) != 0)
      return;
    sockaddr_in bound{};
    socklen_t length = sizeof bound;
    getsockname(listener_, address_of(bound), &length);
    watch(listener_, EPOLLIN, kListener, EPOLL_CTL_ADD);
    port_ = ntohs(bound.sin_port);
    thread_ = std::thread([this] { run(); });
  }
  ~Carrier() {
    {
      std::lock_guard<std::mutex> lock(lock_);
      stopping_ = true;
    }
    stop_.notify_all();
    if (thread_.joinable()) thread_.join();
    for (End& end : ends_) drop(end.fd);
    for (auto& stranger : strangers_)
      if (stranger) drop(stranger->fd);
    drop(listener_);
    drop(beats_);
    if (poll_ >= 0) close(poll_);
  }

  int port() const { return port_; }

  // Where a peer listens. Its link may dial from the next epoch on.
  bool peer(uint32_t peer, const char* address, int port) {
    std::lock_guard<std::mutex> lock(lock_);
    sockaddr_in& there = ends_[peer].address;
    there.sin_family = AF_INET;
    there.sin_port = htons(static_cast<uint16_t>(port));
    return inet_pton(AF_INET, address, &there.sin_addr) == 1;
  }
  // Begin an epoch with the peers that are alive; all that was under way is dropped. Connections
  // to peers of both epochs stay.
  void begin_epoch(uint64_t epoch, const uint8_t* live) {
    std::lock_guard<std::mutex> lock(lock_);
    const double now = clock_now();
    for (uint32_t p = 0; p < ends_.size(); ++p) {
      if (p == me_.rank) continue;
      End& end = ends_[p];
      const bool stays = end.live && live[p] != 0;
      end.live = live[p] != 0;
      if (end.link->begin_epoch(now, epoch, stays)) continue;
      drop(end.fd);
      end.fd = -1;
      end.events = 0;
    }
    progress(0);
  }
  // Beats from now on to the head, or to the agent that carries the beats to the head. Without
  // answers this process ends. Numbers of beats are above `last`: the beats of an earlier process
  // with this rank are below.
  bool lease(const char* address, int port, double keep_alive, uint64_t last) {
    std::lock_guard<std::mutex> lock(lock_);
    sockaddr_in there{};
    there.sin_family = AF_INET;
    there.sin_port = htons(static_cast<uint16_t>(port));
    beats_ = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (beats_ < 0 || inet_pton(AF_INET, address, &there.sin_addr) != 1 ||
        bind(beats_, address_of(own_), sizeof own_) != 0 ||
        connect(beats_, address_of(there), sizeof there) != 0)
      return false;
    lease_.reset(new Lease(keep_alive, lease_now(), last, false));
    watch(beats_, EPOLLIN, kBeatSocket, EPOLL_CTL_ADD);
    return true;
  }
  // This rank is a member now: the lease of `lease` ends, and one of this keep-alive time begins.
  void begin_lease(double keep_alive) {
    std::lock_guard<std::mutex> lock(lock_);
    if (!lease_) return;
    beat();  // does not return for a lease that is over
    lease_.reset(new Lease(keep_alive, lease_now(), lease_->number(), true));
    beat();
  }
  // Whether the head has answered a beat of the lease that has begun: it counts on it.
  bool leased() {
    std::lock_guard<std::mutex> lock(lock_);
    return lease_ && lease_->begun() && lease_->answered();
  }
  // The number of the head's state, as of its last answer to a beat.
  uint64_t news() {
    std::lock_guard<std::mutex> lock(lock_);
    return news_;
  }
  void end_lease() {
    std::lock_guard<std::mutex> lock(lock_);
    lease_.reset();
  }
  // Calls that wait return early where this descriptor can be read.
  void watch_too(int fd) {
    std::lock_guard<std::mutex> lock(lock_);
    watch(fd, EPOLLIN, kWatched, EPOLL_CTL_ADD);
  }

  uint64_t send(uint32_t p, const char* data, uint64_t size, bool lend) {
    std::lock_guard<std::mutex> lock(lock_);
    const uint64_t number = ends_[p].link->send(data, size, lend);
    if (number != 0) write_some(p);
    last_ = clock_now();
    return number;
  }
  // A message of the peer; null data where none came in time, or the watched descriptor is ready.
  Message receive(uint32_t p, double seconds) {
    Link& link = *ends_[p].link;
    wait(seconds, [&link] { return link.has_message(); });
    std::lock_guard<std::mutex> lock(lock_);
    return link.has_message() ? link.take() : Message{nullptr, 0};
  }
  // Whether no message is lent any more, and all others are with the system or wait for a
  // connection; peers marked in `away` do not count.
  bool flush(double seconds, const uint8_t* away) {
    return wait(seconds, [this, away] {
      for (size_t p = 0; p < ends_.size(); ++p) {
        const End& end = ends_[p];
        if (end.link && end.live && !away[p] &&
            (end.link->lent() || (end.link->state() == kUp && end.link->wants_write())))
          return false;
      }
      return true;
    });
  }
  // Whether every live peer has acknowledged all messages; peers marked in `away` do not count.
  bool all_acked(double seconds, const uint8_t* away) {
    return wait(seconds, [this, away] {
      for (size_t p = 0; p < ends_.size(); ++p)
        if (ends_[p].link && ends_[p].live && !away[p] && !ends_[p].link->all_acked())
          return false;
      return true;
    });
  }
  void acknowledge_all() {
    std::lock_guard<std::mutex> lock(lock_);
    for (uint32_t p = 0; p < ends_.size(); ++p)
      if (ends_[p].link && ends_[p].live) {
        ends_[p].link->acknowledge_all();
        write_some(p);
      }
  }
  double down(uint32_t p) {
    std::lock_guard<std::mutex> lock(lock_);
    return ends_[p].link->down(clock_now());
  }
  // Shut down the connection to a peer, as a reset would: for drills.
  bool cut(uint32_t p) {
    std::lock_guard<std::mutex> lock(lock_);
    return ends_[p].fd >= 0 && shutdown(ends_[p].fd, SHUT_RDWR) == 0;
  }
  // connections broken, messages sent again, connections refused, connections that said nothing,
  // bytes kept, the address refused last, the address that said nothing last
  void figures(uint64_t* out) {
    std::lock_guard<std::mutex> lock(lock_);
    memset(out, 0, 7 * sizeof *out);
    for (const End& end : ends_)
      if (end.link) {
        out[0] += end.link->losses();
        out[1] += end.link->resent();
        out[4] += end.link->kept_bytes();
      }
    out[2] = refused_;
    out[3] = silent_;
    out[5] = refused_address_;
    out[6] = silent_address_;
  }

 private:
  struct End {
    std::unique_ptr<Link> link;
    sockaddr_in address{};
    int fd = -1;
    uint32_t events = 0;
    bool live = false;
  };
  struct Stranger {
    int fd;
    Reception reception;
    double until;
    uint32_t address;
    bool greeted = false;
  };
  enum Tag : uint64_t { kPeer = 0, kStranger = 1, kListener = 2, kBeatSocket = 3, kWatched = 4 };

  static sockaddr* address_of(sockaddr_in& address) {
    return reinterpret_cast<sockaddr*>(&address);
  }

  void watch(int fd, uint32_t events, Tag tag, int how, uint32_t number = 0) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = static_cast<uint64_t>(tag) << 32 | number;
    epoll_ctl(poll_, how, fd, &event);
  }
  // Closes a socket in forked processes too: to close its number here alone would keep the
  // connection open, and epoll would go on to report it.
  void drop(int fd) const {
    if (fd < 0) return;
    epoll_ctl(poll_, EPOLL_CTL_DEL, fd, nullptr);
    shutdown(fd, SHUT_RDWR);
    close(fd);
  }
  static void options(int fd) {
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
  static void nonce(uint8_t* out) {
    if (getrandom(out, kNonceBytes, 0) != static_cast<ssize_t>(kNonceBytes)) abort();
  }

  // Makes progress until `done`, for so many seconds; returns whether it is done.
  template <typename Done>
  bool wait(double seconds, Done done) {
    std::lock_guard<std::mutex> lock(lock_);
    const double end = clock_now() + seconds;
    woken_ = false;
    for (;;) {
      if (done()) break;
      const double left = end - clock_now();
      if (left <= 0 || woken_) break;
      progress(left);
    }
    // before a result: calls that are done at once beat too, and a suspended host wakes here
    if (lease_ && lease_now() - looked_ >= kIdle) progress(0);
    last_ = clock_now();
    return done();
  }

  void run() {
    std::unique_lock<std::mutex> lock(lock_);
    while (!stopping_) {
      lock.unlock();
      std::unique_lock<std::mutex> sleep(sleep_);
      stop_.wait_for(sleep, std::chrono::duration<double>(kIdle));
      sleep.unlock();
      lock.lock();
      if (!stopping_ && clock_now() - last_ >= kIdle) progress(0);
    }
  }

  void progress(double seconds) {
    double now = clock_now(), soon = kNever;
    for (uint32_t p = 0; p < ends_.size(); ++p) {
      End& end = ends_[p];
      if (!end.link || !end.live) continue;
      if (!end.link->tick(now)) {
        // after a long pause the silence may be our own
        if (end.link->state() != kDialling) read_some(p);
        if (!end.link->tick(now)) lost(p);
      }
      if (end.link->wants_dial(now)) dial(p);
      if (end.fd >= 0 && end.link->wants_write() && !(end.events & EPOLLOUT)) write_some(p);
      soon = std::min(soon, end.link->next());
    }
    for (auto& stranger : strangers_)
      if (stranger) {
        if (now >= stranger->until) {
          said_nothing(stranger);
        } else {
          soon = std::min(soon, stranger->until);
        }
      }
    if (paused_until_ != 0) {
      if (now >= paused_until_) {
        paused_until_ = 0;
        watch(listener_, EPOLLIN, kListener, EPOLL_CTL_MOD);
      } else {
        soon = std::min(soon, paused_until_);
      }
    }
    if (lease_) {
      beat();
      soon = std::min(soon, now + kIdle);
    }
    const double until = std::min(seconds, std::max(soon - now, 0.0));
    epoll_event ready[64];
    const int count = epoll_wait(poll_, ready, 64, static_cast<int>(until * 1000 + 0.999));
    for (int i = 0; i < count; ++i) {
      const uint32_t number = static_cast<uint32_t>(ready[i].data.u64);
      switch (static_cast<Tag>(ready[i].data.u64 >> 32)) {
        case kPeer: peer_ready(number, ready[i].events); break;
        case kStranger: stranger_ready(number); break;
        case kListener: accept_all(); break;
        case kBeatSocket: hear(); break;
        case kWatched: woken_ = true; break;
      }
    }
  }

  void lost(uint32_t p) {
    End& end = ends_[p];
    drop(end.fd);
    end.fd = -1;
    end.events = 0;
    end.link->broke(clock_now());
  }

  void dial(uint32_t p) {
    End& end = ends_[p];
    end.link->dialling(clock_now());
    sockaddr_in from = own_;
    end.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (end.fd < 0 && (errno == EMFILE || errno == ENFILE)) tell_files();
    options(end.fd);
    const int later = 1;  // the port is chosen by connect: many connections may share one
    setsockopt(end.fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &later, sizeof later);
    if (end.fd < 0 || bind(end.fd, address_of(from), sizeof from) != 0) return lost(p);
    if (connect(end.fd, address_of(end.address), sizeof end.address) != 0 &&
        errno != EINPROGRESS)
      return lost(p);
    update(p);
  }

  // Asks the system for what the link waits for.
  void update(uint32_t p) {
    End& end = ends_[p];
    if (end.fd < 0) return;
    const bool out = end.link->state() == kDialling || end.link->wants_write();
    const uint32_t events = EPOLLIN | (out ? static_cast<uint32_t>(EPOLLOUT) : 0u);
    if (events == end.events) return;
    watch(end.fd, events, kPeer, end.events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, p);
    end.events = events;
  }

  void write_some(uint32_t p) {
    End& end = ends_[p];
    size_t written = 0;
    while (end.fd >= 0 && end.link->state() != kDialling && written < kPassBytes) {
      iovec pieces[2];
      const int count = end.link->gather(pieces);
      if (count == 0) break;
      msghdr message{};
      message.msg_iov = pieces;
      message.msg_iovlen = static_cast<size_t>(count);
      const ssize_t n = sendmsg(end.fd, &message, MSG_NOSIGNAL);
      if (n < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN) break;
        return lost(p);
      }
      end.link->wrote(clock_now(), static_cast<size_t>(n));
      written += static_cast<size_t>(n);
    }
    update(p);
  }

  void read_some(uint32_t p) {
    End& end = ends_[p];
    size_t read = 0;
    while (end.fd >= 0 && read < kPassBytes) {
      const iovec room = end.link->room();
      const ssize_t n = recv(end.fd, room.iov_base, room.iov_len, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) break;
      if (n <= 0 || !end.link->came(clock_now(), static_cast<size_t>(n))) return lost(p);
      read += static_cast<size_t>(n);
    }
    if (end.fd >= 0 && end.link->wants_write()) write_some(p);
  }

  void peer_ready(uint32_t p, uint32_t events) {
    End& end = ends_[p];
    if (end.fd < 0) return;
    if (end.link->state() == kDialling) {
      int error = 0;
      socklen_t length = sizeof error;
      getsockopt(end.fd, SOL_SOCKET, SO_ERROR, &error, &length);
      if (error != 0) return lost(p);
      if (!(events & EPOLLOUT)) return;
      uint8_t fresh[kNonceBytes];
      nonce(fresh);
      end.link->dialled(clock_now(), fresh);
      return write_some(p);
    }
    if (events & EPOLLOUT) write_some(p);
    if (end.fd >= 0 && (events & (EPOLLIN | EPOLLERR | EPOLLHUP))) read_some(p);
  }

  void tell_files() {
    const std::string line = "ecrm: rank " + std::to_string(me_.rank) +
                             " has no file left for a connection: raise ulimit -n (told once)\n";
    if (!told_files_ && write(2, line.data(), line.size()) < 0) {
    }
    told_files_ = true;
  }

  // Epoll would report the listener again and again.
  void pause_listener() {
    paused_until_ = clock_now() + kPause;
    watch(listener_, 0, kListener, EPOLL_CTL_MOD);
  }

  void accept_all() {
    for (int i = 0; i < kPassItems; ++i) {
      sockaddr_in from{};
      socklen_t length = sizeof from;
      const int fd =
          accept4(listener_, address_of(from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE) tell_files();
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
          pause_listener();
        return;
      }
      options(fd);
      size_t slot = 0;
      for (size_t i = 0; i < strangers_.size(); ++i) {
        if (!strangers_[i]) {
          slot = i;
          break;
        }
        if (strangers_[i]->until < strangers_[slot]->until) slot = i;
      }
      if (strangers_[slot]) said_nothing(strangers_[slot]);
      strangers_[slot].reset(new Stranger{fd, Reception(me_), clock_now() + settings_.greet,
                                          from.sin_addr.s_addr});
      watch(fd, EPOLLIN, kStranger, EPOLL_CTL_ADD, static_cast<uint32_t>(slot));
      stranger_ready(static_cast<uint32_t>(slot));  // most who are refused take no place
    }
  }

  void send_away(std::unique_ptr<Stranger>& stranger) {
    drop(stranger->fd);
    stranger.reset();
  }

  void said_nothing(std::unique_ptr<Stranger>& stranger) {
    if (!stranger->greeted) {
      ++silent_;
      silent_address_ = stranger->address;
    }
    send_away(stranger);
  }

  void stranger_ready(uint32_t slot) {
    std::unique_ptr<Stranger>& stranger = strangers_[slot];
    while (stranger) {
      char bytes[sizeof(Greeting)];
      const size_t wanted = std::min(stranger->reception.wanted(), sizeof bytes);
      const ssize_t n = recv(stranger->fd, bytes, wanted, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return;
      if (n <= 0) return said_nothing(stranger);
      const Reception::Step step = stranger->reception.came(bytes, static_cast<size_t>(n));
      if (step == Reception::kMore) continue;
      const Greeting& theirs = stranger->reception.theirs();
      if (step == Reception::kRefused) {
        ++refused_;
        refused_address_ = stranger->address;
        return send_away(stranger);
      }
      End& end = ends_[theirs.from];
      // a peer of another epoch dials again, until both are in the same one
      if (!end.live || theirs.epoch != end.link->epoch()) return send_away(stranger);
      if (step == Reception::kAsks) {
        uint8_t fresh[kNonceBytes];
        nonce(fresh);
        const std::string answer = stranger->reception.answer(
            end.link->epoch(), end.link->expected(), end.link->partial(), fresh);
        if (::send(stranger->fd, answer.data(), answer.size(), MSG_NOSIGNAL) !=
            static_cast<ssize_t>(answer.size()))
          return send_away(stranger);
        stranger->greeted = true;
        continue;
      }
      const int fd = stranger->fd;
      const uint32_t p = theirs.from;
      const uint64_t expected = theirs.expected, partial = theirs.partial;
      stranger.reset();
      if (end.fd >= 0) lost(p);
      end.fd = fd;
      watch(fd, EPOLLIN, kPeer, EPOLL_CTL_MOD, p);
      end.events = EPOLLIN;
      if (!end.link->adopt(clock_now(), expected, partial)) return lost(p);
      write_some(p);
      return read_some(p);
    }
  }

  Beat beat_of(uint64_t kind, uint64_t number, uint64_t news = 0) const {
    Beat beat{kBeatMagic, {}, kind, me_.rank, number, news};
    memcpy(beat.run, me_.run.data(), kRunBytes);
    return beat;
  }

  void beat() {
    const double now = looked_ = lease_now();
    if (lease_->expired(now)) {
      const std::string line = "ecrm: rank " + std::to_string(me_.rank) +
                               ": no answer of the head machine in time: rank killed\n";
      if (write(2, line.data(), line.size()) < 0) {
      }
      kill(getpid(), SIGKILL);
    }
    const uint64_t number = lease_->beat(now);
    if (number == 0) return;
    const Beat beat = beat_of(kBeats, number, lease_->begun() ? 1 : 0);
    std::string text(reinterpret_cast<const char*>(&beat), sizeof beat);
    text += hmac(me_.secret, text);
    ::send(beats_, text.data(), text.size(), MSG_NOSIGNAL);  // a lost one is followed by others
  }

  void hear() {
    char bytes[sizeof(Beat) + kDigestBytes + 1];
    ssize_t n;
    for (int i = 0; i < kPassItems && (n = recv(beats_, bytes, sizeof bytes, 0)) >= 0; ++i) {
      if (!lease_ || n != static_cast<ssize_t>(sizeof(Beat) + kDigestBytes)) continue;
      const std::string text(bytes, sizeof(Beat));
      Beat beat;
      memcpy(&beat, bytes, sizeof beat);
      const Beat right = beat_of(kAnswers, beat.number, beat.news);
      if (memcmp(&beat, &right, sizeof beat) == 0 &&
          same(std::string(bytes + sizeof(Beat), kDigestBytes), hmac(me_.secret, text))) {
        lease_->heard(beat.number);
        news_ = std::max(news_, beat.news);
      }
    }
  }

  const Identity me_;
  const Settings settings_;
  sockaddr_in own_{};
  std::vector<End> ends_;
  std::vector<std::unique_ptr<Stranger>> strangers_;
  int listener_ = -1, poll_ = -1, beats_ = -1, port_ = 0;
  std::unique_ptr<Lease> lease_;
  uint64_t news_ = 0, refused_ = 0, silent_ = 0, refused_address_ = 0, silent_address_ = 0;
  double last_ = 0, looked_ = 0, paused_until_ = 0;
  bool woken_ = false, stopping_ = false, told_files_ = false;
  std::mutex lock_, sleep_;
  std::condition_variable stop_;
  std::thread thread_;
};

}  // namespace links
}  // namespace ecrm
