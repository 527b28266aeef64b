// What do the instructions of a warp compute? ldmatrix with its bank conflicts, mma.sync, shuffles, and the roundings
// of cvt.
#pragma once

#include <math.h>

#include "memory.h"

namespace smelt {

inline float low(uint32_t pair) { return from_bits(pair << 16); }
inline float high(uint32_t pair) { return from_bits(pair & 0xffff0000u); }

inline float exponential(float x) { return expf(x); }

namespace emulator {

inline uint32_t round_to_bf16(float value) {
  uint32_t bits = smelt::bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // NaN
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

typedef float Vector __attribute__((vector_size(16)));

struct MatrixLoad {
  uint32_t* r;
  size_t offset;
};

// The 8 rows of one phase stand in 32 banks of 4 bytes; rows of different addresses in the same 4 banks take a turn
// each.
inline void count_phase(Counts& counts, const size_t (&row)[8]) {
  int64_t worst = 1;
  for (int i = 0; i < 8; ++i) {
    int64_t ways = 0;
    for (int j = 0; j < 8; ++j) {
      bool seen = false;
      for (int k = 0; k < j; ++k) seen |= row[k] == row[j];
      ways += !seen && row[j] / 16 % 8 == row[i] / 16 % 8;
    }
    if (ways > worst) worst = ways;
  }
  ++counts.matrix_phases;
  counts.extra_ways += worst - 1;
  if (worst > counts.worst_ways) counts.worst_ways = worst;
}

template <bool TRANSPOSED>
inline void load_matrix(uint32_t (&r)[4], const void* shared) {
  MatrixLoad load{r, shared_offset(shared, 16, 16)};
  read_shared(load.offset, 16);
  meet_warp(&load, [](void** payloads) {
    Block& block = *current;
    for (int q = 0; q < 4; ++q) {
      size_t row[8];
      uint16_t matrix[8][8];
      for (int i = 0; i < 8; ++i) {
        row[i] = static_cast<MatrixLoad*>(payloads[q * 8 + i])->offset;
        memcpy(matrix[i], block.shared + row[i], 16);
      }
      count_phase(block.counts, row);
      for (int lane = 0; lane < 32; ++lane) {
        int g = lane / 4, t = lane % 4 * 2;
        uint32_t first = TRANSPOSED ? matrix[t][g] : matrix[g][t];
        uint32_t second = TRANSPOSED ? matrix[t + 1][g] : matrix[g][t + 1];
        static_cast<MatrixLoad*>(payloads[lane])->r[q] = first | second << 16;
      }
    }
  });
}

struct Mma {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
};

inline void multiply(void** payloads) {
  float a[16][16], b[16][8], c[16][8];
  ++current->counts.mma;
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& mine = *static_cast<Mma*>(payloads[lane]);
    int g = lane / 4, t = lane % 4 * 2;
    for (int q = 0; q < 4; ++q) {
      a[g + q % 2 * 8][t + q / 2 * 8] = low(mine.a[q]);
      a[g + q % 2 * 8][t + q / 2 * 8 + 1] = high(mine.a[q]);
      c[g + q / 2 * 8][t + q % 2] = mine.c[q];
    }
    for (int q = 0; q < 2; ++q) {
      b[t + q * 8][g] = low(mine.b[q]);
      b[t + q * 8 + 1][g] = high(mine.b[q]);
    }
  }
  for (int i = 0; i < 16; ++i) {
    Vector sum[2], right[2];
    memcpy(sum, c[i], sizeof sum);
    for (int k = 0; k < 16; ++k) {
      memcpy(right, b[k], sizeof right);
      for (int v = 0; v < 2; ++v) sum[v] += a[i][k] * right[v];
    }
    memcpy(c[i], sum, sizeof sum);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int q = 0; q < 4; ++q) static_cast<Mma*>(payloads[lane])->c[q] = c[lane / 4 + q / 2 * 8][lane % 4 * 2 + q % 2];
}

struct Shuffle {
  uint32_t value, result;
  int by;
};

inline uint32_t shuffle(uint32_t value, int by, bool up) {
  Shuffle mine{value, 0, by};
  meet_warp(&mine, [up](void** payloads) {
    for (int lane = 0; lane < 32; ++lane) {
      Shuffle& to = *static_cast<Shuffle*>(payloads[lane]);
      int from = up ? (lane < to.by ? lane : lane - to.by) : lane ^ to.by;
      if (from < 0 || from > 31) fail("%s by %d", current->running->operation.name, to.by);
      to.result = static_cast<Shuffle*>(payloads[from])->value;
    }
  });
  return mine.result;
}

}  // namespace emulator

inline uint32_t pack(float low, float high) {
  return emulator::round_to_bf16(low) | emulator::round_to_bf16(high) << 16;
}

inline void load_matrix4(uint32_t (&r)[4], const void* shared, emulator::Where where = emulator::here()) {
  emulator::begin("ldmatrix.x4", where);
  emulator::load_matrix<false>(r, shared);
}

inline void load_matrix4_transposed(uint32_t (&r)[4], const void* shared, emulator::Where where = emulator::here()) {
  emulator::begin("ldmatrix.x4.trans", where);
  emulator::load_matrix<true>(r, shared);
}

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                emulator::Where where = emulator::here()) {
  emulator::begin("mma.m16n8k16", where);
  emulator::Mma mine{c, a, {b0, b1}};
  emulator::meet_warp(&mine, emulator::multiply);
}

inline uint32_t shuffle_xor(uint32_t value, int lane_mask, emulator::Where where = emulator::here()) {
  emulator::begin("shfl.bfly", where);
  return emulator::shuffle(value, lane_mask, false);
}

inline float shuffle_xor(float value, int lane_mask, emulator::Where where = emulator::here()) {
  return from_bits(shuffle_xor(bits(value), lane_mask, where));
}

inline int shuffle_up(int value, int delta, emulator::Where where = emulator::here()) {
  emulator::begin("shfl.up", where);
  return static_cast<int>(emulator::shuffle(static_cast<uint32_t>(value), delta, true));
}

}  // namespace smelt
