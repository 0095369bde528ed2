// Compiled once per instruction set by each_set.h. Operations have the order of README.md and
// reference.py. Every operation is rounded by itself (-ffp-contract=off), so the instruction set
// changes no bit, except of a NaN.

// Number of rows between prefetch and use. Measured on Zen 5 with records of 260 bytes.
constexpr int64_t kRowsAhead = 24;

ECRM_INLINE Floats load_floats(const uint8_t* from) {
  Floats value;
  memcpy(&value, from, sizeof value);
  return value;
}

// Writes new values over old values, then the changed bits to `delta` unless `delta` is null. The
// order matters, because writes leave the processor in order. The row is in the cache, so writes to
// the row must not wait for writes to the delta.
ECRM_INLINE void replace_floats(uint8_t* at, Floats old, Floats fresh, uint8_t* delta) {
  memcpy(at, &fresh, sizeof fresh);
  if (delta == nullptr) return;
  const Words change = (Words)old ^ (Words)fresh;
  memcpy(delta, &change, sizeof change);
}

ECRM_INLINE Floats floats_from_bfloat(Halves bits) {
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

ECRM_INLINE Halves floats_to_bfloat(Floats values) {
  const Words bits = (Words)values;
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // to nearest, ties to even
  const Words nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((rounded & ~nan) | (0x7fc0u & nan), Halves);
}

ECRM_INLINE void replace_halves(uint8_t* at, Halves old, Halves fresh, uint8_t* delta) {
  memcpy(at, &fresh, sizeof fresh);
  if (delta == nullptr) return;
  const Halves change = old ^ fresh;
  memcpy(delta, &change, sizeof change);
}

typedef float Eight __attribute__((vector_size(32)));
typedef int32_t EightNumbers __attribute__((vector_size(32)));

ECRM_INLINE Eight squares(const float* from) {
  Eight g;
  memcpy(&g, from, sizeof g);
  return g * g;
}

// Eight partial sums, element d in sum d mod 8, in the order of FBGEMM's AVX2 kernel:
// ((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7)).
ECRM_INLINE float sum_of_squares(const float* gradient, int64_t dimension) {
  Eight p = {};
  int64_t d = 0;
  for (; d + 64 <= dimension; d += 64) {
    for (int eight = 0; eight < 8; ++eight) p += squares(gradient + d + 8 * eight);
  }
  for (; d + 8 <= dimension; d += 8) p += squares(gradient + d);
  if (d < dimension) {
    Eight g = {};
    memcpy(&g, gradient + d, static_cast<size_t>(dimension - d) * sizeof(float));
    p += g * g;
  }
  p += __builtin_shuffle(p, EightNumbers{1, 0, 3, 2, 5, 4, 7, 6});
  p += __builtin_shuffle(p, EightNumbers{2, 3, 0, 1, 6, 7, 4, 5});
  return p[0] + p[4];
}

// Updates row-wise Adagrad's state, one number per row. Writes the changed bits to `change`, and
// returns the row's step size.
ECRM_INLINE float update_row_state(uint8_t* state, const float* gradient, int64_t dimension,
                                   const Hyper& hyper, uint32_t* change) {
  float old, fresh;
  uint32_t fresh_bits;
  memcpy(&old, state, sizeof old);
  fresh = old + sum_of_squares(gradient, dimension) / static_cast<float>(dimension);
  memcpy(change, &old, sizeof old);
  memcpy(&fresh_bits, &fresh, sizeof fresh);
  *change ^= fresh_bits;
  memcpy(state, &fresh, sizeof fresh);
  return hyper.learning_rate / (__builtin_sqrtf(fresh) + hyper.eps);
}

// The addresses of a row, or of a part of a row. The delta pointers are null without a delta.
struct Row {
  uint8_t* weights;
  uint8_t* state[2];
  uint8_t* weights_delta;
  uint8_t* state_delta[2];
  const float* gradient;
};

// The new values of a lane's weights w; a decoupled decay is already applied to w. `step` is
// row-wise Adagrad's step size. Writes Adagrad's and Adam's new state to the row.
ECRM_INLINE Floats updated(int optimizer, const Hyper& hyper, float step, const Row& row,
                           Floats w) {
  Floats g;
  memcpy(&g, row.gradient, sizeof g);
  if (optimizer == kSgd) return floats_fused(Floats{} - hyper.learning_rate, g, w);
  if (optimizer == kRowwiseAdagrad) return w - g * step;
  const Floats old0 = load_floats(row.state[0]);
  if (optimizer == kAdagrad) {
    const Floats h = floats_fused(g, g, old0);
    const Doubles root =
        doubles_sqrt(__builtin_convertvector(h, Doubles)) + static_cast<double>(hyper.eps);
    const Doubles scaled = __builtin_convertvector(g * hyper.learning_rate, Doubles);
    replace_floats(row.state[0], old0, h, row.state_delta[0]);
    return __builtin_convertvector(__builtin_convertvector(w, Doubles) - scaled / root, Floats);
  }
  const Floats old1 = load_floats(row.state[1]);
  const Floats m = old0 * hyper.beta1 + g * hyper.one_minus_beta1;
  const Floats v = old1 * hyper.beta2 + (g * g) * hyper.one_minus_beta2;
  const Floats root = floats_sqrt(v / hyper.correction2) + hyper.eps;
  replace_floats(row.state[0], old0, m, row.state_delta[0]);
  replace_floats(row.state[1], old1, v, row.state_delta[1]);
  return w - ((m / hyper.correction1) / root) * hyper.learning_rate;
}

ECRM_INLINE Floats widened(int type, Halves bits) {
  return type == kFloat16 ? floats_from_half(bits) : floats_from_bfloat(bits);
}

// Updates kFloats elements of a row.
ECRM_INLINE void update_lane(int type, int optimizer, const Hyper& hyper, float step,
                             const Row& row) {
  if (type == kFloat32) {
    const Floats old = load_floats(row.weights);
    const Floats fresh = updated(optimizer, hyper, step, row, old * hyper.keep);
    replace_floats(row.weights, old, fresh, row.weights_delta);
    return;
  }
  Halves old;
  memcpy(&old, row.weights, sizeof old);
  const Floats fresh = updated(optimizer, hyper, step, row, widened(type, old) * hyper.keep);
  replace_halves(row.weights, old,
                 type == kFloat16 ? floats_to_half(fresh) : floats_to_bfloat(fresh),
                 row.weights_delta);
}

// Updates the last `count` < kFloats elements of a row, in padded copies.
ECRM_INLINE void update_rest(int type, int optimizer, const Hyper& hyper, float step,
                             const Row& row, int64_t count) {
  const size_t weight_bytes = static_cast<size_t>(count) * (type == kFloat32 ? 4 : 2);
  const size_t float_bytes = static_cast<size_t>(count) * 4;
  const int states = optimizer == kAdagrad ? 1 : optimizer == kAdam ? 2 : 0;
  alignas(64) uint8_t weights[64] = {}, weights_delta[64] = {}, state[2][64] = {},
                      state_delta[2][64] = {};
  alignas(64) float gradient[kFloats] = {};
  memcpy(gradient, row.gradient, float_bytes);
  memcpy(weights, row.weights, weight_bytes);
  for (int s = 0; s < states; ++s) memcpy(state[s], row.state[s], float_bytes);
  update_lane(
      type, optimizer, hyper, step,
      {weights, {state[0], state[1]}, weights_delta, {state_delta[0], state_delta[1]}, gradient});
  memcpy(row.weights, weights, weight_bytes);
  for (int s = 0; s < states; ++s) memcpy(row.state[s], state[s], float_bytes);
  if (row.weights_delta == nullptr) return;
  memcpy(row.weights_delta, weights_delta, weight_bytes);
  for (int s = 0; s < states; ++s) memcpy(row.state_delta[s], state_delta[s], float_bytes);
}

// The row's addresses, moved on by `count` elements.
ECRM_INLINE Row further(Row row, int type, int states, int64_t count) {
  row.weights += count * (type == kFloat32 ? 4 : 2);
  row.gradient += count;
  if (row.weights_delta != nullptr) row.weights_delta += count * (type == kFloat32 ? 4 : 2);
  for (int s = 0; s < states; ++s) {
    row.state[s] += 4 * count;
    if (row.state_delta[s] != nullptr) row.state_delta[s] += 4 * count;
  }
  return row;
}

// Updates a row, four lanes at a time without a branch, as in parity_apply.
ECRM_INLINE void update_row(int type, int optimizer, const Hyper& hyper, float step, const Row& row,
                            int64_t dimension) {
  const int states = optimizer == kAdagrad ? 1 : optimizer == kAdam ? 2 : 0;
  int64_t d = 0;
  for (; d + 4 * kFloats <= dimension; d += 4 * kFloats) {
    for (int lane = 0; lane < 4; ++lane) {
      update_lane(type, optimizer, hyper, step, further(row, type, states, d + lane * kFloats));
    }
  }
  for (; d + kFloats <= dimension; d += kFloats) {
    update_lane(type, optimizer, hyper, step, further(row, type, states, d));
  }
  if (d < dimension)
    update_rest(type, optimizer, hyper, step, further(row, type, states, d), dimension - d);
}

// kFloats elements of a row's gradient with L2 decay: g + w * l2.
ECRM_INLINE void decay_lane(int type, const Hyper& hyper, const uint8_t* weights,
                            const float* gradient, float* decayed) {
  Floats g;
  Halves bits;
  memcpy(&g, gradient, sizeof g);
  if (type != kFloat32) memcpy(&bits, weights, sizeof bits);
  g += (type == kFloat32 ? load_floats(weights) : widened(type, bits)) * hyper.l2;
  memcpy(decayed, &g, sizeof g);
}

ECRM_INLINE void decay_gradient(int type, const Hyper& hyper, const Row& row, float* decayed,
                                int64_t dimension) {
  const int64_t size = type == kFloat32 ? 4 : 2;
  int64_t d = 0;
  for (; d + kFloats <= dimension; d += kFloats)
    decay_lane(type, hyper, row.weights + d * size, row.gradient + d, decayed + d);
  if (d == dimension) return;
  const size_t rest = static_cast<size_t>(dimension - d);
  alignas(64) uint8_t weights[64] = {};
  alignas(64) float gradient[kFloats] = {}, result[kFloats];
  memcpy(weights, row.weights + d * size, rest * static_cast<size_t>(size));
  memcpy(gradient, row.gradient + d, rest * sizeof(float));
  decay_lane(type, hyper, weights, gradient, result);
  memcpy(decayed + d, result, rest * sizeof(float));
}

ECRM_INLINE Row row_at(const Update& u, int64_t i, int64_t row_bytes, int64_t state_bytes,
                       int states, bool with_delta) {
  Row row = {};
  row.weights = u.weights + u.rows[i] * u.weights_stride;
  row.gradient = u.gradients + i * u.gradient_stride;
  for (int s = 0; s < states; ++s) row.state[s] = u.state[s] + u.rows[i] * u.state_stride[s];
  if (with_delta) {
    row.weights_delta = u.delta + i * u.delta_stride;
    if (row.weights_delta == nullptr) __builtin_unreachable();  // so no lane checks the pointer
    for (int s = 0; s < states; ++s)
      row.state_delta[s] = row.weights_delta + row_bytes + s * state_bytes;
  }
  return row;
}

ECRM_INLINE void update_rows_of(int64_t dimension, int type, int optimizer, bool with_delta,
                                const Update& u) {
  const int64_t row_bytes = dimension * (type == kFloat32 ? 4 : 2);
  const int64_t state_bytes = optimizer == kRowwiseAdagrad ? 4 : dimension * 4;
  const int states = optimizer == kSgd ? 0 : optimizer == kAdam ? 2 : 1;
  const int64_t last = u.rows_there - 1;
  for (int64_t i = 0; i < u.n; ++i) {
    const int64_t next = u.rows[i + kRowsAhead < last ? i + kRowsAhead : last];
    fetch_row(u.weights + next * u.weights_stride, row_bytes);
    for (int s = 0; s < states; ++s) fetch_row(u.state[s] + next * u.state_stride[s], state_bytes);
    Row row = row_at(u, i, row_bytes, state_bytes, states, with_delta);
    if (u.hyper.l2 != 0) {
      decay_gradient(type, u.hyper, row, u.decayed, dimension);
      row.gradient = u.decayed;
    }
    if (optimizer == kRowwiseAdagrad) {
      uint32_t change;
      const float step = update_row_state(row.state[0], row.gradient, dimension, u.hyper, &change);
      update_row(type, optimizer, u.hyper, step, row, dimension);
      // last: a delta is written front to back
      if (with_delta) memcpy(row.state_delta[0], &change, sizeof change);
    } else {
      update_row(type, optimizer, u.hyper, 0, row, dimension);
    }
  }
}

// The usual dimensions are compiled with unrolled loops, an eighth faster.
ECRM_INLINE void update_rows(int type, int optimizer, bool with_delta, const Update& u) {
  if (type != kFloat32) return update_rows_of(u.dimension, type, optimizer, with_delta, u);
  switch (u.dimension) {
    case 16: return update_rows_of(16, type, optimizer, with_delta, u);
    case 32: return update_rows_of(32, type, optimizer, with_delta, u);
    case 64: return update_rows_of(64, type, optimizer, with_delta, u);
    case 128: return update_rows_of(128, type, optimizer, with_delta, u);
    default: return update_rows_of(u.dimension, type, optimizer, with_delta, u);
  }
}

// One function per weight type and optimizer; a common function takes the compiler twice as long.
// Every function copies the arguments, so the compiler knows that writes to rows do not change the
// arguments.
#define ECRM_UPDATE(name, type, optimizer)    \
  static void name(const Update& given) {     \
    const Update u = given;                   \
    if (u.delta != nullptr) {                 \
      update_rows(type, optimizer, true, u);  \
    } else {                                  \
      update_rows(type, optimizer, false, u); \
    }                                         \
  }
ECRM_UPDATE(sgd_float32, kFloat32, kSgd)
ECRM_UPDATE(sgd_float16, kFloat16, kSgd)
ECRM_UPDATE(sgd_bfloat16, kBfloat16, kSgd)
ECRM_UPDATE(rowwise_adagrad_float32, kFloat32, kRowwiseAdagrad)
ECRM_UPDATE(rowwise_adagrad_float16, kFloat16, kRowwiseAdagrad)
ECRM_UPDATE(rowwise_adagrad_bfloat16, kBfloat16, kRowwiseAdagrad)
ECRM_UPDATE(adagrad_float32, kFloat32, kAdagrad)
ECRM_UPDATE(adagrad_float16, kFloat16, kAdagrad)
ECRM_UPDATE(adagrad_bfloat16, kBfloat16, kAdagrad)
ECRM_UPDATE(adam_float32, kFloat32, kAdam)
ECRM_UPDATE(adam_float16, kFloat16, kAdam)
ECRM_UPDATE(adam_bfloat16, kBfloat16, kAdam)
#undef ECRM_UPDATE

static void update(const Update& u) {
  static void (*const functions[4][3])(const Update&) = {
      {sgd_float32, sgd_float16, sgd_bfloat16},
      {rowwise_adagrad_float32, rowwise_adagrad_float16, rowwise_adagrad_bfloat16},
      {adagrad_float32, adagrad_float16, adagrad_bfloat16},
      {adam_float32, adam_float16, adam_bfloat16},
  };
  functions[u.optimizer][u.type](u);
}
