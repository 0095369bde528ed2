// The link of two ranks: a state machine without I/O; see README.md.
//
// Events go in (a connection was made, bytes came, bytes were written, it broke, time passed).
// Actions are asked for (dial, bytes to write, memory to read into). Times are seconds of any clock
// that does not go back.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <limits>
#include <memory>
#include <string>

#include "links/sha256.h"

namespace ecrm {
namespace links {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames are written as they lie");

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr size_t kNonceBytes = 16, kRunBytes = 16;
constexpr uint64_t kMagic = 0x316b6e696c6d7263;  // "crmlink1"
constexpr size_t kCacheBytes = 1 << 15;
constexpr size_t kDirectBytes = 1 << 14;         // so much of a message is read where it will lie
constexpr uint64_t kMostBytes = uint64_t{1} << 40;  // of a message: more was never sent
constexpr double kFirstPatience = 4;  // part of `greet` for a first try, and of how long one took
constexpr size_t kOverhead = 64;  // of a kept message, so that empty ones count as well

// What a rank says first over a new connection.
struct Greeting {
  uint64_t magic;
  uint8_t run[kRunBytes];
  uint32_t from, to;
  uint64_t epoch;
  uint64_t expected;  // the number of the next message that it expects
  uint64_t partial;   // the bytes of that message that it has
  uint8_t nonce[kNonceBytes];
};
static_assert(sizeof(Greeting) == 72, "without gaps");

enum Kind : uint64_t { kData = 1, kAck = 2, kEpoch = 3 };

// Before the bytes of a message, from byte `offset` on. An acknowledgement has neither. kEpoch: all
// that follows is of the epoch `number`.
struct Frame {
  uint64_t kind, number, size, offset, ack;
};

struct Settings {
  double beat = 0.25;    // seconds without a frame, after which one is sent
  double silence = 1.0;  // seconds without a byte, after which a connection is given up
  double greet = 1.0;    // the most seconds for a connection and its greeting
  double first_pause = 0.002, longest_pause = 0.05;  // before a rank dials again
  uint64_t window = 16 << 20;   // bytes of copied messages that wait for their acknowledgement
  uint64_t prompt = 64 << 10;   // a message of so many bytes is acknowledged at once
};

struct Identity {
  std::string run, secret;
  uint32_t rank;
};

inline std::string text_of(const Greeting& greeting) {
  return std::string(reinterpret_cast<const char*>(&greeting), sizeof greeting);
}

// The proof of the rank that was dialled (`side` is 'a'), or of the one that dials ('d').
inline std::string proof(const std::string& secret, char side, const Greeting& dialler,
                         const Greeting& answerer) {
  return hmac(secret, std::string(1, side) + text_of(dialler) + text_of(answerer));
}

inline Greeting greeting_of(const Identity& me, uint32_t to, uint64_t epoch, uint64_t expected,
                            uint64_t partial, const uint8_t* nonce) {
  Greeting greeting{kMagic, {}, me.rank, to, epoch, expected, partial, {}};
  memcpy(greeting.run, me.run.data(), std::min(me.run.size(), kRunBytes));
  memcpy(greeting.nonce, nonce, kNonceBytes);
  return greeting;
}

inline bool names(const Greeting& greeting, const Identity& me, uint64_t epoch) {
  Greeting mine = greeting_of(me, 0, epoch, 0, 0, greeting.nonce);
  return greeting.magic == kMagic && greeting.to == me.rank && greeting.epoch == epoch &&
         memcmp(greeting.run, mine.run, kRunBytes) == 0;
}

struct Message {
  char* data;  // of malloc
  uint64_t size;
};

enum State { kDown = 0, kDialling = 1, kGreeting = 2, kUp = 3 };

class Link {
 public:
  Link(const Identity& me, uint32_t peer, const Settings& settings)
      : me_(me), peer_(peer), settings_(settings), pause_(settings.first_pause),
        patience_(settings.greet / kFirstPatience) {
    cache_.reset(new char[kCacheBytes]);
  }
  ~Link() { forget_incoming(); }
  Link(const Link&) = delete;

  State state() const { return state_; }
  bool dials() const { return me_.rank < peer_; }
  uint64_t epoch() const { return epoch_; }
  uint64_t expected() const { return expected_; }
  uint64_t partial() const { return body_ != nullptr ? body_done_ : 0; }
  uint64_t sent() const { return number_; }
  uint64_t kept_bytes() const { return kept_bytes_; }
  uint64_t losses() const { return losses_; }
  uint64_t resent() const { return resent_; }
  double heard() const { return heard_; }
  // Seconds since the last byte of the other rank, in this epoch; 0 over a connection that has
  // brought bytes. A connection may be made again and again, and carry no frame.
  double down(double now) const { return state_ == kUp && carries_ ? 0 : now - since_; }
  // Messages up to this number have arrived, and their memory is no longer read.
  uint64_t acked() const { return pending_() ? std::min(acked_, frame_.number - 1) : acked_; }
  bool all_acked() const { return acked() == number_; }
  // Whether a message that was lent is not yet acknowledged.
  bool lent() const { return lent_ > acked(); }
  bool has_message() const { return !ready_.empty(); }

  // ---- actions asked for

  bool wants_dial(double now) const { return dials() && state_ == kDown && now >= again_; }
  bool wants_write() const {
    return !control_.empty() || writing_ ||
           (state_ == kUp && (next_ < kept_.size() || due_ || announces_));
  }
  // When `tick` has something to do.
  double next() const {
    if (state_ == kDown) return dials() ? again_ : kNever;
    if (state_ != kUp) return began_ + patience_;
    const double silent = heard_ + settings_.silence;
    return writing_ || due_ ? silent : std::min(silent, said_ + settings_.beat);
  }

  // ---- events

  void dialling(double now) {
    state_ = kDialling;
    began_ = now;
  }
  // The connection that this rank dialled is there.
  void dialled(double now, const uint8_t* nonce) {
    state_ = kGreeting;
    answer_.clear();
    mine_ = greeting_of(me_, peer_, epoch_, expected_, partial(), nonce);
    control_ = text_of(mine_);
    (void)now;
  }
  // A connection that the other rank dialled has proved who it is. False: it contradicts this link.
  bool adopt(double now, uint64_t expected, uint64_t partial) {
    broke(now);
    return up(now, expected, partial);
  }
  void broke(double now) {
    if (state_ == kDown) return;
    if (state_ == kUp) {
      ++losses_;
      resent_ += next_;
      if (carries_) since_ = std::max(since_, heard_);
    } else if (now >= began_ + patience_) {
      patience_ = std::min(2 * patience_, settings_.greet);
    }
    drop();
    again_ = now + pause_;
    pause_ = std::min(2 * pause_, settings_.longest_pause);
  }
  // Time has passed. False: the connection is to be closed, and `broke` called.
  bool tick(double now) {
    if (state_ == kDialling || state_ == kGreeting) return now < began_ + patience_;
    if (state_ != kUp) return true;
    if (now >= heard_ + settings_.silence) return false;
    if (now >= said_ + settings_.beat && !writing_) due_ = true;
    return true;
  }
  // Acknowledge now whatever has come: this rank waits, or leaves.
  void acknowledge_all() {
    if (state_ == kUp && expected_ - 1 > told_) due_ = true;
  }
  // The number of the message; 0: too many bytes wait for their acknowledgement, try again later.
  // A lent message is not copied: its memory stays as it is until `acked`.
  uint64_t send(const char* data, uint64_t size, bool lend) {
    if (!lend && kept_bytes_ != 0 && kept_bytes_ + size + kOverhead > settings_.window) return 0;
    Outgoing message{++number_, data, size, nullptr};
    if (lend) {
      lent_ = number_;
    } else {
      message.copy.reset(new char[size + 1]);
      if (size != 0) memcpy(message.copy.get(), data, size);
      message.data = message.copy.get();
      kept_bytes_ += size + kOverhead;
    }
    kept_.push_back(std::move(message));
    return number_;
  }
  // The oldest message that has come and was not taken; the caller frees it.
  Message take() {
    Message message = ready_.front();
    ready_.pop_front();
    return message;
  }
  // A new epoch: everything under way is dropped, and numbers begin at 1. The connection stays if
  // `keeps` asks so, unless a message is half written. False: the connection is to be closed.
  //
  // The ends begin the epoch at different times. An end that stays says so in a frame of its own,
  // so the other end knows where messages of the epoch begin, and drops messages before. Messages
  // of the next epoch that come early are kept, and acknowledged once the epoch has begun here.
  bool begin_epoch(double now, uint64_t epoch, bool keeps = false) {
    keeps = keeps && state_ == kUp && !(pending_() && out_done_ != 0);
    if (!keeps) {
      drop();
      forget_incoming();
    } else if (their_epoch_ != epoch) {
      if (in_body_ && skip_ == 0) skip_ = frame_in_.size - body_done_;
      forget_incoming();
    }
    if (pending_()) writing_ = false;
    kept_.clear();
    epoch_ = epoch;
    number_ = acked_ = told_ = lent_ = kept_bytes_ = 0;
    next_ = 0;
    resume_ = 0;
    pause_ = settings_.first_pause;
    again_ = since_ = now;
    due_ = false;
    announces_ = keeps;
    return keeps;
  }

  // Where the next bytes that come are to be written.
  iovec room() {
    if (in_body_ && at_ == end_ && body_ != nullptr && skip_ == 0 &&
        frame_in_.size - body_done_ >= kDirectBytes) {
      direct_ = true;
      return {body_ + body_done_, frame_in_.size - body_done_};
    }
    direct_ = false;
    at_ = end_ = 0;
    return {cache_.get(), kCacheBytes};
  }
  // So many bytes came, where `room` said. False: the connection is to be closed, `broke` called.
  bool came(double now, size_t n) {
    heard_ = now;
    if (direct_) {
      carries_ = true;
      body_done_ += n;
      if (body_done_ == frame_in_.size) complete();
      return true;
    }
    end_ = n;
    while (at_ < end_) {
      const char* from = cache_.get() + at_;
      const size_t there = end_ - at_;
      carries_ = state_ == kUp;
      if (state_ == kGreeting) {
        const size_t wanted = sizeof(Greeting) + kDigestBytes - answer_.size();
        const size_t taken = std::min(there, wanted);
        answer_.append(from, taken);
        at_ += taken;
        if (taken == wanted && !answered(now)) return false;
      } else if (state_ != kUp) {
        return false;
      } else if (!in_body_) {
        const size_t taken = std::min(there, sizeof(Frame) - head_done_);
        memcpy(reinterpret_cast<char*>(&frame_in_) + head_done_, from, taken);
        head_done_ += taken;
        at_ += taken;
        if (head_done_ == sizeof(Frame) && !begin_frame()) return false;
      } else if (skip_ != 0) {
        const size_t taken = static_cast<size_t>(std::min<uint64_t>(there, skip_));
        at_ += taken;
        skip_ -= taken;
        if (skip_ == 0) in_body_ = false;
      } else {
        const size_t taken =
            static_cast<size_t>(std::min<uint64_t>(there, frame_in_.size - body_done_));
        memcpy(body_ + body_done_, from, taken);
        at_ += taken;
        body_done_ += taken;
        if (body_done_ == frame_in_.size) complete();
      }
    }
    return true;
  }

  // The next bytes to write, in up to two pieces. Returns the number of pieces.
  int gather(iovec* pieces) {
    if (!control_.empty()) {
      pieces[0] = {const_cast<char*>(control_.data()), control_.size()};
      return 1;
    }
    if (!writing_ && !begin_write()) return 0;
    int count = 0;
    const size_t head = sizeof(Frame);
    if (out_done_ < head)
      pieces[count++] = {reinterpret_cast<char*>(&frame_) + out_done_,
                         static_cast<size_t>(head - out_done_)};
    const uint64_t body = out_done_ > head ? out_done_ - head : 0;
    if (body < out_size_)
      pieces[count++] = {const_cast<char*>(out_data_) + body,
                         static_cast<size_t>(out_size_ - body)};
    return count;
  }
  // So many of these bytes were written.
  void wrote(double now, size_t n) {
    said_ = now;
    if (!control_.empty()) {
      control_.erase(0, n);
      return;
    }
    out_done_ += n;
    if (out_done_ == sizeof(Frame) + out_size_) {
      writing_ = false;
      release();
    }
  }

 private:
  struct Outgoing {
    uint64_t number;
    const char* data;
    uint64_t size;
    std::unique_ptr<char[]> copy;  // null: lent
  };

  bool pending_() const { return writing_ && frame_.kind == kData; }

  // The connection is gone; messages stay.
  void drop() {
    state_ = kDown;
    control_.clear();
    answer_.clear();
    writing_ = due_ = announces_ = in_body_ = direct_ = false;
    skip_ = head_done_ = at_ = end_ = 0;
    release();
    next_ = 0;
  }

  void forget_incoming() {
    expected_ = 1;
    told_ = unsaid_ = 0;
    for (Message& message : ready_) free(message.data);
    ready_.clear();
    free(body_);
    body_ = nullptr;
    body_done_ = 0;
  }

  // Lets go of acknowledged messages, but never of the one that is being written.
  void release() {
    const uint64_t until = acked();
    while (!kept_.empty() && kept_.front().number <= until) {
      if (kept_.front().copy) kept_bytes_ -= kept_.front().size + kOverhead;
      kept_.pop_front();
      if (next_ != 0) --next_;
    }
  }

  bool acknowledge(uint64_t until) {
    if (until > number_) return false;
    if (until > acked_) {
      acked_ = until;
      release();
    }
    return true;
  }

  bool up(double now, uint64_t expected, uint64_t partial) {
    if (expected == 0 || expected - 1 < acked_ || !acknowledge(expected - 1)) return false;
    const bool begun = !kept_.empty() && kept_.front().number == expected;
    if (partial > (begun ? kept_.front().size : 0)) return false;
    resume_ = partial;
    next_ = 0;
    state_ = kUp;
    their_epoch_ = epoch_;
    heard_ = said_ = now;
    pause_ = settings_.first_pause;
    told_ = 0;
    carries_ = false;
    // The greeting may be older than the last messages of the connection before, and the other rank
    // waits for a first frame.
    due_ = true;
    return true;
  }

  // The other rank has answered this rank's greeting.
  bool answered(double now) {
    Greeting theirs;
    memcpy(&theirs, answer_.data(), sizeof theirs);
    if (!names(theirs, me_, epoch_) || theirs.from != peer_) return false;
    if (!same(answer_.substr(sizeof theirs), proof(me_.secret, 'a', mine_, theirs))) return false;
    control_ += proof(me_.secret, 'd', mine_, theirs);
    patience_ = std::max(settings_.greet / kFirstPatience,
                         std::min(settings_.greet, kFirstPatience * (now - began_)));
    return up(now, theirs.expected, theirs.partial);
  }

  bool begin_frame() {
    const Frame& frame = frame_in_;
    head_done_ = 0;
    if (frame.kind == kEpoch) {
      if (frame.size != 0 || frame.number <= their_epoch_) return false;
      their_epoch_ = frame.number;
      forget_incoming();
    }
    if (their_epoch_ == epoch_ && !acknowledge(frame.ack)) return false;
    if (frame.kind == kEpoch) return true;
    if (frame.kind == kAck) return frame.size == 0;
    if (frame.kind != kData || frame.size > kMostBytes || frame.offset > frame.size) return false;
    const bool old = their_epoch_ < epoch_;
    if ((frame.number > expected_ && !old) || frame.number == 0) return false;
    if (frame.number < expected_ || old) {  // it came over a connection before, or came too late
      skip_ = frame.size - frame.offset;
      in_body_ = skip_ != 0;
      return true;
    }
    if (body_ == nullptr) {
      if (frame.offset != 0) return false;
      body_ = static_cast<char*>(malloc(frame.size + 1));
      if (body_ == nullptr) return false;
      body_size_ = frame.size;
    } else if (frame.size != body_size_ || frame.offset > body_done_) {
      return false;
    }
    body_done_ = frame.offset;
    in_body_ = true;
    if (body_done_ == frame.size) complete();
    return true;
  }

  void complete() {
    ready_.push_back({body_, frame_in_.size});
    body_ = nullptr;
    body_done_ = 0;
    in_body_ = direct_ = false;
    ++expected_;
    unsaid_ += frame_in_.size + kOverhead;
    if (frame_in_.size >= settings_.prompt || unsaid_ >= settings_.window / 4) due_ = true;
  }

  bool begin_write() {
    if (state_ != kUp) return false;
    if (announces_) {
      frame_ = {kEpoch, epoch_, 0, 0, expected_ - 1};
      out_data_ = nullptr;
      out_size_ = 0;
      announces_ = false;
    } else if (next_ < kept_.size()) {
      const Outgoing& message = kept_[next_++];
      frame_ = {kData, message.number, message.size, resume_, expected_ - 1};
      out_data_ = message.data + resume_;
      out_size_ = message.size - resume_;
      resume_ = 0;
    } else if (due_) {
      frame_ = {kAck, 0, 0, 0, expected_ - 1};
      out_data_ = nullptr;
      out_size_ = 0;
    } else {
      return false;
    }
    told_ = expected_ - 1;
    unsaid_ = 0;
    due_ = false;
    out_done_ = 0;
    writing_ = true;
    return true;
  }

  const Identity& me_;
  const uint32_t peer_;
  const Settings& settings_;
  State state_ = kDown;
  uint64_t epoch_ = 1, their_epoch_ = 1;  // theirs: of the bytes that come
  double began_ = 0, again_ = 0, pause_, heard_ = 0, said_ = 0, since_ = 0;
  double patience_;  // seconds for the connection that is being made, and its greeting
  // outgoing
  std::deque<Outgoing> kept_;
  size_t next_ = 0;  // in kept_: the next to be written
  uint64_t number_ = 0, acked_ = 0, lent_ = 0, kept_bytes_ = 0, resume_ = 0;
  Frame frame_{};
  const char* out_data_ = nullptr;
  uint64_t out_size_ = 0, out_done_ = 0;
  bool writing_ = false, due_ = false, announces_ = false;
  bool carries_ = false;  // bytes have come over this connection
  // incoming
  std::deque<Message> ready_;
  uint64_t expected_ = 1, told_ = 0, unsaid_ = 0;
  Frame frame_in_{};
  size_t head_done_ = 0;
  char* body_ = nullptr;
  uint64_t body_size_ = 0, body_done_ = 0, skip_ = 0;
  bool in_body_ = false, direct_ = false;
  std::unique_ptr<char[]> cache_;
  size_t at_ = 0, end_ = 0;
  // greeting
  std::string control_, answer_;
  Greeting mine_{};
  uint64_t losses_ = 0, resent_ = 0;
};

// A connection that was accepted and has not proved who dialled it.
class Reception {
 public:
  enum Step { kMore = 0, kAsks = 1, kProved = 2, kRefused = 3 };

  explicit Reception(const Identity& me) : me_(me) {}

  const Greeting& theirs() const { return theirs_; }
  // How many bytes may be read: no more than those of this half of the greeting.
  size_t wanted() const {
    return (answered_ ? kDigestBytes : sizeof(Greeting)) - text_.size();
  }
  // kAsks: `answer`, or close. kProved: theirs() is true.
  Step came(const char* data, size_t n) {
    text_.append(data, n);
    if (wanted() != 0) return kMore;
    if (answered_)
      return same(text_, proof(me_.secret, 'd', theirs_, mine_)) ? kProved : kRefused;
    memcpy(&theirs_, text_.data(), sizeof theirs_);
    text_.clear();
    return names(theirs_, me_, theirs_.epoch) && theirs_.from < me_.rank ? kAsks : kRefused;
  }
  // The bytes to write, for the link to theirs().from.
  std::string answer(uint64_t epoch, uint64_t expected, uint64_t partial, const uint8_t* nonce) {
    answered_ = true;
    mine_ = greeting_of(me_, theirs_.from, epoch, expected, partial, nonce);
    return text_of(mine_) + proof(me_.secret, 'a', theirs_, mine_);
  }

 private:
  const Identity& me_;
  std::string text_;
  Greeting theirs_{}, mine_{};
  bool answered_ = false;
};

}  // namespace links
}  // namespace ecrm
