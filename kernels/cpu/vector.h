// What is a vector on this CPU? The widest that the compiler was told of, by the vector extensions of GCC.
#pragma once
#include <cstdint>
#include <cstring>

namespace smelt {

// ROWS x 2 sums, 2 vectors of B and 1 of A stay in registers: 27 of 32 (AVX-512, NEON), 15 of 16 (AVX2).
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#elif defined(__ARM_NEON)
constexpr int LANES = 4, ROWS = 12;
#else
constexpr int LANES = 4, ROWS = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector v) { *reinterpret_cast<Unaligned*>(to) = v; }

// The first `count` lanes; the others are 0.
inline Vector load(const float* from, int count) {
    if (count >= LANES) return load(from);
    float lanes[LANES] = {};
    std::memcpy(lanes, from, 4 * count);
    return load(lanes);
}

inline void store(float* to, Vector v, int count) {
    if (count >= LANES) return store(to, v);
    float lanes[LANES];
    store(lanes, v);
    std::memcpy(to, lanes, 4 * count);
}

inline float total(Vector v) {
    float lanes[LANES], sum = 0;
    store(lanes, v);
    for (float lane : lanes) sum += lane;
    return sum;
}

// e^x to 2 ulp: 2^n e^r with |r| <= ln 2 / 2 and Taylor's series; NaN stays NaN, results stay between 2^-126 and 2^127.
inline Vector exponential(Vector x) {
    const Vector zero = {};
    x = x > 88.0f ? zero + 88.0f : x;
    x = x < -87.0f ? zero - 87.0f : x;
    const float whole = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    Vector shifted = x * 1.44269504f + whole;
    Vector n = shifted - whole;
    Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    Vector p = zero + 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    Integers power = (reinterpret_cast<Integers>(shifted) << 23) + (127 << 23);
    return p * reinterpret_cast<Vector>(power);
}

// Columns for rows, of LANES vectors: interleaving halves log2(LANES) times.
inline void transpose(Vector (&v)[LANES]) {
    Integers low, high;
    for (int i = 0; i < LANES; ++i) {
        low[i] = i / 2 + (i % 2 ? LANES : 0);
        high[i] = low[i] + LANES / 2;
    }
    for (int step = 1; step < LANES; step *= 2) {
        Vector mixed[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES / 2; ++i) {
            mixed[2 * i] = __builtin_shuffle(v[i], v[i + LANES / 2], low);
            mixed[2 * i + 1] = __builtin_shuffle(v[i], v[i + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) v[i] = mixed[i];
    }
}

}  // namespace smelt
