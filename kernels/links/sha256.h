// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the proofs of a greeting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace ecrm {
namespace links {

constexpr size_t kDigestBytes = 32;
constexpr size_t kBlockBytes = 64;

// The SHA-256 of a text, as 32 bytes.
inline std::string sha256(const std::string& text) {
  static const uint32_t constants[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
      0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
      0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
      0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
      0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
      0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
      0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
      0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
      0xc67178f2};
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::string padded = text;
  padded.push_back(static_cast<char>(0x80));
  while (padded.size() % kBlockBytes != kBlockBytes - 8) padded.push_back(0);
  const uint64_t bits = 8 * static_cast<uint64_t>(text.size());
  for (int byte = 7; byte >= 0; --byte) padded.push_back(static_cast<char>(bits >> 8 * byte));
  const auto turned = [](uint32_t word, int by) { return word >> by | word << (32 - by); };
  for (size_t block = 0; block < padded.size(); block += kBlockBytes) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(padded.data()) + block;
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = static_cast<uint32_t>(bytes[4 * i]) << 24 | bytes[4 * i + 1] << 16 |
             bytes[4 * i + 2] << 8 | bytes[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[i - 7] +
             (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    uint32_t s[8];
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; ++i) {
      const uint32_t first = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) +
                             ((s[4] & s[5]) ^ (~s[4] & s[6])) + constants[i] + w[i];
      const uint32_t second = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) +
                              ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
      memmove(s + 1, s, 7 * sizeof(uint32_t));
      s[4] += first;
      s[0] = first + second;
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
  std::string digest;
  for (const uint32_t word : state)
    for (int byte = 3; byte >= 0; --byte) digest.push_back(static_cast<char>(word >> 8 * byte));
  return digest;
}

// HMAC-SHA-256 of a text under a secret.
inline std::string hmac(const std::string& secret, const std::string& text) {
  std::string key = secret.size() > kBlockBytes ? sha256(secret) : secret;
  key.resize(kBlockBytes, 0);
  std::string inner = key, outer = key;
  for (size_t i = 0; i < kBlockBytes; ++i) {
    inner[i] ^= 0x36;
    outer[i] ^= 0x5c;
  }
  return sha256(outer + sha256(inner + text));
}

// Whether two texts are the same, in a time that does not tell where they differ.
inline bool same(const std::string& one, const std::string& other) {
  if (one.size() != other.size()) return false;
  unsigned char different = 0;
  for (size_t i = 0; i < one.size(); ++i) different |= one[i] ^ other[i];
  return different == 0;
}

}  // namespace links
}  // namespace ecrm
