// Compiled once per instruction set by each_set.h. The order of operations is that of README.md and reference.py;
// every operation is rounded on its own (-ffp-contract=off), so no instruction set can change a bit.

constexpr int64_t kRowsAhead = 12;

ECRM_INLINE Floats load_floats(const uint8_t* from) {
  Floats value;
  memcpy(&value, from, sizeof value);
  return value;
}

// Writes new bits over old ones, and old XOR new to `delta` unless it is null.
ECRM_INLINE void replace_floats(uint8_t* at, Floats value, uint8_t* delta) {
  Integers fresh, old;
  memcpy(&fresh, &value, sizeof fresh);
  if (delta != nullptr) {
    memcpy(&old, at, sizeof old);
    old ^= fresh;
    memcpy(delta, &old, sizeof old);
  }
  memcpy(at, &fresh, sizeof fresh);
}

ECRM_INLINE Floats load_weights(int type, const uint8_t* from) {
  if (type == kFloat32) return load_floats(from);
  uint16_t bits[8];
  memcpy(bits, from, sizeof bits);
  if (type == kFloat16) return floats_from_half(bits);
  Integers wide;
  for (int i = 0; i < 8; ++i) wide[i] = static_cast<int32_t>(static_cast<uint32_t>(bits[i]) << 16);
  Floats value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

ECRM_INLINE void floats_to_bfloat(Floats value, uint16_t bits[8]) {
  uint32_t wide[8];
  memcpy(wide, &value, sizeof wide);
  for (int i = 0; i < 8; ++i) {
    const uint32_t nan = (wide[i] & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (wide[i] + 0x7fffu + (wide[i] >> 16 & 1u)) >> 16;
    bits[i] = static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
  }
}

ECRM_INLINE void replace_weights(int type, uint8_t* at, Floats value, uint8_t* delta) {
  if (type == kFloat32) {
    replace_floats(at, value, delta);
    return;
  }
  typedef uint64_t Bits __attribute__((vector_size(16)));
  Bits fresh, old;
  uint16_t bits[8];
  if (type == kFloat16) {
    floats_to_half(value, bits);
  } else {
    floats_to_bfloat(value, bits);
  }
  memcpy(&fresh, bits, sizeof fresh);
  if (delta != nullptr) {
    memcpy(&old, at, sizeof old);
    old ^= fresh;
    memcpy(delta, &old, sizeof old);
  }
  memcpy(at, &fresh, sizeof fresh);
}

// ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7)): the order in which FBGEMM's AVX2 kernel adds its partial sums.
ECRM_INLINE float sum_of_eight(Floats p) {
  return ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
}

ECRM_INLINE float sum_of_squares(const float* gradient, int64_t dimension) {
  Floats partial = {};
  int64_t d = 0;
  for (; d + 8 <= dimension; d += 8) {
    Floats g;
    memcpy(&g, gradient + d, sizeof g);
    partial += g * g;
  }
  if (d < dimension) {
    Floats g = {};
    memcpy(&g, gradient + d, static_cast<size_t>(dimension - d) * sizeof(float));
    partial += g * g;
  }
  return sum_of_eight(partial);
}

// One row's places; the delta pointers are null where no delta is wanted.
struct Row {
  uint8_t* weights;
  uint8_t* state[2];
  uint8_t* weights_delta;
  uint8_t* state_delta[2];
  const float* gradient;
};

// Eight elements. `step` is the row's step size, used by row-wise Adagrad only.
ECRM_INLINE void update_eight(int type, int optimizer, const Hyper& hyper, float step, const Row& row) {
  Floats g;
  memcpy(&g, row.gradient, sizeof g);
  const Floats w = load_weights(type, row.weights);
  Floats fresh;
  if (optimizer == kSgd) {
    const Floats minus_rate = Floats{} - hyper.learning_rate;
    fresh = floats_fused(minus_rate, g, w);
  } else if (optimizer == kRowwiseAdagrad) {
    fresh = w - g * step;
  } else if (optimizer == kAdagrad) {
    const Floats h = floats_fused(g, g, load_floats(row.state[0]));
    const Doubles scaled = __builtin_convertvector(g * hyper.learning_rate, Doubles);
    const Doubles root = doubles_sqrt(__builtin_convertvector(h, Doubles)) + static_cast<double>(hyper.eps);
    fresh = __builtin_convertvector(__builtin_convertvector(w, Doubles) - scaled / root, Floats);
    replace_floats(row.state[0], h, row.state_delta[0]);
  } else {
    const Floats m = load_floats(row.state[0]) * hyper.beta1 + g * hyper.one_minus_beta1;
    const Floats v = load_floats(row.state[1]) * hyper.beta2 + (g * g) * hyper.one_minus_beta2;
    const Floats root = floats_sqrt(v / hyper.correction2) + hyper.eps;
    fresh = w - ((m / hyper.correction1) / root) * hyper.learning_rate;
    replace_floats(row.state[0], m, row.state_delta[0]);
    replace_floats(row.state[1], v, row.state_delta[1]);
  }
  replace_weights(type, row.weights, fresh, row.weights_delta);
}

// The last `count` < 8 elements of a row, in padded copies.
ECRM_INLINE void update_rest(int type, int optimizer, const Hyper& hyper, float step, const Row& row, int64_t count) {
  const size_t weight_bytes = static_cast<size_t>(count) * (type == kFloat32 ? 4 : 2);
  const size_t float_bytes = static_cast<size_t>(count) * 4;
  const int states = optimizer == kAdagrad ? 1 : optimizer == kAdam ? 2 : 0;
  alignas(32) uint8_t weights[32] = {}, weights_delta[32] = {}, state[2][32] = {}, state_delta[2][32] = {};
  alignas(32) float gradient[8] = {};
  memcpy(gradient, row.gradient, float_bytes);
  memcpy(weights, row.weights, weight_bytes);
  for (int s = 0; s < states; ++s) memcpy(state[s], row.state[s], float_bytes);
  update_eight(type, optimizer, hyper, step,
               {weights, {state[0], state[1]}, weights_delta, {state_delta[0], state_delta[1]}, gradient});
  memcpy(row.weights, weights, weight_bytes);
  for (int s = 0; s < states; ++s) memcpy(row.state[s], state[s], float_bytes);
  if (row.weights_delta == nullptr) return;
  memcpy(row.weights_delta, weights_delta, weight_bytes);
  for (int s = 0; s < states; ++s) memcpy(row.state_delta[s], state_delta[s], float_bytes);
}

ECRM_INLINE void update_row(int type, int optimizer, const Hyper& hyper, Row row, int64_t dimension) {
  float step = 0;
  if (optimizer == kRowwiseAdagrad) {
    float old, fresh;
    memcpy(&old, row.state[0], sizeof old);
    fresh = old + sum_of_squares(row.gradient, dimension) / static_cast<float>(dimension);
    step = hyper.learning_rate / (__builtin_sqrtf(fresh) + hyper.eps);
    if (row.state_delta[0] != nullptr) {
      uint32_t old_bits, fresh_bits;
      memcpy(&old_bits, &old, 4);
      memcpy(&fresh_bits, &fresh, 4);
      old_bits ^= fresh_bits;
      memcpy(row.state_delta[0], &old_bits, 4);
    }
    memcpy(row.state[0], &fresh, sizeof fresh);
  }
  const int64_t weight_bytes = type == kFloat32 ? 32 : 16;
  int64_t d = 0;
  for (; d + 8 <= dimension; d += 8) {
    update_eight(type, optimizer, hyper, step, row);
    row.weights += weight_bytes;
    row.gradient += 8;
    if (row.weights_delta != nullptr) row.weights_delta += weight_bytes;
    if (optimizer == kAdagrad || optimizer == kAdam) {
      for (int s = 0; s < (optimizer == kAdam ? 2 : 1); ++s) {
        row.state[s] += 32;
        if (row.state_delta[s] != nullptr) row.state_delta[s] += 32;
      }
    }
  }
  if (d < dimension) update_rest(type, optimizer, hyper, step, row, dimension - d);
}

ECRM_INLINE void fetch(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 1, 3);
  if (bytes > 0) __builtin_prefetch(from + bytes - 1, 1, 3);
}

ECRM_INLINE void update_rows(int type, int optimizer, bool with_delta, const Update& u) {
  const int64_t row_bytes = u.dimension * (type == kFloat32 ? 4 : 2);
  const int64_t state_bytes = optimizer == kRowwiseAdagrad ? 4 : u.dimension * 4;
  const int states = optimizer == kSgd ? 0 : optimizer == kAdam ? 2 : 1;
  for (int64_t i = 0; i < u.n; ++i) {
    if (i + kRowsAhead < u.n) {
      const int64_t next = u.rows[i + kRowsAhead];
      fetch(u.weights + next * u.weights_stride, row_bytes < 1024 ? row_bytes : 1024);
      for (int s = 0; s < states; ++s) {
        fetch(u.state[s] + next * u.state_stride[s], state_bytes < 1024 ? state_bytes : 1024);
      }
    }
    Row row = {};
    row.weights = u.weights + u.rows[i] * u.weights_stride;
    row.gradient = u.gradients + i * u.gradient_stride;
    for (int s = 0; s < states; ++s) row.state[s] = u.state[s] + u.rows[i] * u.state_stride[s];
    if (with_delta) {
      row.weights_delta = u.delta + i * u.delta_stride;
      for (int s = 0; s < states; ++s) row.state_delta[s] = row.weights_delta + row_bytes + s * state_bytes;
    }
    update_row(type, optimizer, u.hyper, row, u.dimension);
  }
}

ECRM_INLINE void update_type(int type, const Update& u) {
  const bool with_delta = u.delta != nullptr;
  if (u.optimizer == kSgd) {
    with_delta ? update_rows(type, kSgd, true, u) : update_rows(type, kSgd, false, u);
  } else if (u.optimizer == kRowwiseAdagrad) {
    with_delta ? update_rows(type, kRowwiseAdagrad, true, u) : update_rows(type, kRowwiseAdagrad, false, u);
  } else if (u.optimizer == kAdagrad) {
    with_delta ? update_rows(type, kAdagrad, true, u) : update_rows(type, kAdagrad, false, u);
  } else {
    with_delta ? update_rows(type, kAdam, true, u) : update_rows(type, kAdam, false, u);
  }
}

static void update(const Update& u) {
  if (u.type == kFloat32) {
    update_type(kFloat32, u);
  } else if (u.type == kFloat16) {
    update_type(kFloat16, u);
  } else {
    update_type(kBfloat16, u);
  }
}
