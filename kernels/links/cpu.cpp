// The C entries of a link and of a reception, and of the carrier that runs them over sockets.
#include "links/carrier.h"
#include "links/link.h"
#include "links/loopback.h"
#include "native.h"

using ecrm::links::Carrier;
using ecrm::links::Greeting;
using ecrm::links::Identity;
using ecrm::links::Link;
using ecrm::links::Message;
using ecrm::links::Reception;
using ecrm::links::Settings;

namespace {

// A link or a reception with what it refers to.
struct OwnLink {
  Identity me;
  Settings settings;
  Link link;
  OwnLink(const Identity& me, uint32_t peer, const Settings& settings)
      : me(me), settings(settings), link(this->me, peer, this->settings) {}
};

struct OwnReception {
  Identity me;
  Reception reception;
  explicit OwnReception(const Identity& me) : me(me), reception(this->me) {}
};

Identity identity(const char* run, const char* secret, int64_t secret_bytes, uint32_t rank) {
  return {std::string(run, ecrm::links::kRunBytes), std::string(secret, secret_bytes), rank};
}

}  // namespace

ECRM_ENTRY void ecrm_hmac(const char* secret, int64_t secret_bytes, const char* text,
                          int64_t bytes, char* out) {
  const std::string code =
      ecrm::links::hmac(std::string(secret, secret_bytes), std::string(text, bytes));
  memcpy(out, code.data(), code.size());
}

ECRM_ENTRY void* ecrm_link_new(const char* run, const char* secret, int64_t secret_bytes,
                               uint32_t rank, uint32_t peer, const Settings* settings) {
  return new OwnLink(identity(run, secret, secret_bytes, rank), peer, *settings);
}
ECRM_ENTRY void ecrm_link_free(OwnLink* l) { delete l; }
ECRM_ENTRY void ecrm_link_dialling(OwnLink* l, double now) { l->link.dialling(now); }
ECRM_ENTRY void ecrm_link_dialled(OwnLink* l, double now, const uint8_t* nonce) {
  l->link.dialled(now, nonce);
}
ECRM_ENTRY int ecrm_link_adopt(OwnLink* l, double now, uint64_t expected, uint64_t partial) {
  return l->link.adopt(now, expected, partial);
}
ECRM_ENTRY void ecrm_link_broke(OwnLink* l, double now) { l->link.broke(now); }
ECRM_ENTRY int ecrm_link_tick(OwnLink* l, double now) { return l->link.tick(now); }
ECRM_ENTRY void ecrm_link_acknowledge_all(OwnLink* l) { l->link.acknowledge_all(); }
ECRM_ENTRY uint64_t ecrm_link_send(OwnLink* l, const char* data, uint64_t size, int lend) {
  return l->link.send(data, size, lend != 0);
}
// Null where nothing has come; else the memory, for ecrm_link_free_message.
ECRM_ENTRY char* ecrm_link_take(OwnLink* l, uint64_t* size) {
  if (!l->link.has_message()) return nullptr;
  const Message message = l->link.take();
  *size = message.size;
  return message.data;
}
ECRM_ENTRY void ecrm_link_free_message(char* data) { free(data); }
ECRM_ENTRY int ecrm_link_begin_epoch(OwnLink* l, double now, uint64_t epoch, int keeps) {
  return l->link.begin_epoch(now, epoch, keeps != 0);
}
ECRM_ENTRY int ecrm_link_came(OwnLink* l, double now, const char* data, uint64_t n) {
  while (n != 0) {
    const iovec room = l->link.room();
    const size_t some = std::min<uint64_t>(n, room.iov_len);
    memcpy(room.iov_base, data, some);
    if (!l->link.came(now, some)) return 0;
    data += some;
    n -= some;
  }
  return 1;
}
// Copies the next bytes to write, at most `most`; returns how many.
ECRM_ENTRY uint64_t ecrm_link_gather(OwnLink* l, char* out, uint64_t most) {
  iovec pieces[2];
  const int count = l->link.gather(pieces);
  uint64_t n = 0;
  for (int i = 0; i < count && n < most; ++i) {
    const size_t some = std::min<uint64_t>(most - n, pieces[i].iov_len);
    memcpy(out + n, pieces[i].iov_base, some);
    n += some;
  }
  return n;
}
ECRM_ENTRY void ecrm_link_wrote(OwnLink* l, double now, uint64_t n) { l->link.wrote(now, n); }
ECRM_ENTRY int ecrm_link_wants_dial(OwnLink* l, double now) { return l->link.wants_dial(now); }
ECRM_ENTRY double ecrm_link_next(OwnLink* l) { return l->link.next(); }
ECRM_ENTRY double ecrm_link_down(OwnLink* l, double now) { return l->link.down(now); }
// state, epoch, expected, partial, sent, acked, kept bytes, connections lost, messages resent,
// whether a message is lent
ECRM_ENTRY void ecrm_link_figures(OwnLink* l, uint64_t* out) {
  const Link& k = l->link;
  const uint64_t figures[] = {static_cast<uint64_t>(k.state()), k.epoch(), k.expected(),
                              k.partial(), k.sent(), k.acked(), k.kept_bytes(), k.losses(),
                              k.resent(), static_cast<uint64_t>(k.lent())};
  memcpy(out, figures, sizeof figures);
}

ECRM_ENTRY void* ecrm_reception_new(const char* run, const char* secret, int64_t secret_bytes,
                                    uint32_t rank) {
  return new OwnReception(identity(run, secret, secret_bytes, rank));
}
ECRM_ENTRY void ecrm_reception_free(OwnReception* r) { delete r; }
ECRM_ENTRY uint64_t ecrm_reception_wanted(OwnReception* r) { return r->reception.wanted(); }
ECRM_ENTRY int ecrm_reception_came(OwnReception* r, const char* data, uint64_t n) {
  return r->reception.came(data, n);
}
ECRM_ENTRY uint64_t ecrm_reception_answer(OwnReception* r, uint64_t epoch, uint64_t expected,
                                          uint64_t partial, const uint8_t* nonce, char* out) {
  const std::string text = r->reception.answer(epoch, expected, partial, nonce);
  memcpy(out, text.data(), text.size());
  return text.size();
}
// from, epoch, expected, partial of the greeting that came
ECRM_ENTRY void ecrm_reception_figures(OwnReception* r, uint64_t* out) {
  const Greeting& g = r->reception.theirs();
  out[0] = g.from;
  out[1] = g.epoch;
  out[2] = g.expected;
  out[3] = g.partial;
}

// Null, with the system's error number in `port`, where it cannot listen.
ECRM_ENTRY void* ecrm_carrier_new(const char* run, const char* secret, int64_t secret_bytes,
                                  uint32_t rank, uint32_t world, const Settings* settings,
                                  const char* address, int* port) {
  auto* carrier =
      new Carrier(identity(run, secret, secret_bytes, rank), world, *settings, address);
  *port = carrier->port();
  if (*port != 0) return carrier;
  *port = errno;
  delete carrier;
  return nullptr;
}
ECRM_ENTRY void ecrm_carrier_free(Carrier* c) { delete c; }
ECRM_ENTRY int ecrm_carrier_peer(Carrier* c, uint32_t peer, const char* address, int port) {
  return c->peer(peer, address, port);
}
ECRM_ENTRY void ecrm_carrier_begin_epoch(Carrier* c, uint64_t epoch, const uint8_t* live) {
  c->begin_epoch(epoch, live);
}
ECRM_ENTRY int ecrm_carrier_lease(Carrier* c, const char* address, int port, double keep_alive,
                                  uint64_t last) {
  return c->lease(address, port, keep_alive, last);
}
ECRM_ENTRY void ecrm_carrier_begin_lease(Carrier* c, double keep_alive) {
  c->begin_lease(keep_alive);
}
ECRM_ENTRY int ecrm_carrier_leased(Carrier* c) { return c->leased(); }
ECRM_ENTRY uint64_t ecrm_carrier_news(Carrier* c) { return c->news(); }
ECRM_ENTRY void ecrm_carrier_end_lease(Carrier* c) { c->end_lease(); }
ECRM_ENTRY void ecrm_carrier_watch(Carrier* c, int fd) { c->watch_too(fd); }
ECRM_ENTRY uint64_t ecrm_carrier_send(Carrier* c, uint32_t peer, const void* data, uint64_t size,
                                      int lend) {
  return c->send(peer, static_cast<const char*>(data), size, lend != 0);
}
// Null where nothing came in time; else the memory, for ecrm_link_free_message.
ECRM_ENTRY char* ecrm_carrier_receive(Carrier* c, uint32_t peer, uint64_t* size, double seconds) {
  const Message message = c->receive(peer, seconds);
  *size = message.size;
  return message.data;
}
ECRM_ENTRY int ecrm_carrier_flush(Carrier* c, double seconds, const uint8_t* away) {
  return c->flush(seconds, away);
}
ECRM_ENTRY int ecrm_carrier_all_acked(Carrier* c, double seconds, const uint8_t* away) {
  return c->all_acked(seconds, away);
}
ECRM_ENTRY void ecrm_carrier_acknowledge_all(Carrier* c) { c->acknowledge_all(); }
ECRM_ENTRY double ecrm_carrier_down(Carrier* c, uint32_t peer) { return c->down(peer); }
ECRM_ENTRY int ecrm_carrier_cut(Carrier* c, uint32_t peer) { return c->cut(peer); }
ECRM_ENTRY void ecrm_carrier_figures(Carrier* c, uint64_t* out) { c->figures(out); }
