// How are two matrices multiplied on one core? C = A B, with B in panels that stay in the second cache and strips of
// ROWS rows of A that stay in the first. Every element of C is summed by one thread, in order of k.
#pragma once
#include <algorithm>
#include <vector>

#include "vector.h"

namespace smelt {

constexpr int WIDE = 2 * LANES;       // columns of a panel
constexpr int DEPTH = 512;            // most k at a time
constexpr int PANELS = 128 * 1024;    // floats of B at a time: 512 KiB, half of a second cache
constexpr int STRIDE = DEPTH + 16;    // between the rows of a strip; a power of two would put them all in one set

// Rows of a matrix, or those that `index` names.
struct Rows {
    const float* base;
    int64_t stride;
    const int64_t* index = nullptr;
    const float* operator[](int64_t i) const { return base + (index ? index[i] : i) * stride; }
    Rows from(int64_t i) const { return index ? Rows{base, stride, index + i} : Rows{base + i * stride, stride}; }
};

struct Workspace {
    alignas(64) float a[ROWS * STRIDE];
    alignas(64) float b[PANELS + WIDE * LANES];
};

inline Workspace& workspace() {
    static thread_local std::vector<Workspace> own(1);
    return own[0];
}

// c += a b, M rows by V vectors; element (i, k) of the strip stands at a[i * I + k * K].
template <int M, int V, int I, int K>
inline void tile(int depth, const float* a, const float* b, float* c, int64_t stride, bool add, int columns) {
    Vector sums[M][V] = {};
    for (int k = 0; k < depth; ++k, a += K, b += V * LANES) {
        Vector right[V];
#pragma GCC unroll 2
        for (int j = 0; j < V; ++j) right[j] = *reinterpret_cast<const Vector*>(b + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
            for (int j = 0; j < V; ++j) sums[i][j] += a[i * I] * right[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < V; ++j) {
            float* to = c + i * stride + j * LANES;
            int left = columns - j * LANES;
            if (left >= LANES) {
                store(to, add ? load(to) + sums[i][j] : sums[i][j]);
            } else {
                store(to, add ? load(to, left) + sums[i][j] : sums[i][j], left);
            }
        }
    }
}

template <int V, int I, int K, int M = ROWS>
inline void tile_of(int rows, int depth, const float* a, const float* b, float* c, int64_t stride, bool add, int n) {
    if (rows == M) return tile<M, V, I, K>(depth, a, b, c, stride, add, n);
    if constexpr (M > 1) tile_of<V, I, K, M - 1>(rows, depth, a, b, c, stride, add, n);
}

// Panels of `depth` rows: WIDE columns, then LANES where no more are left; what is past n is 0.
template <class Pack>
inline void pack_panels(int n, int depth, float* b, Pack pack) {
    for (int j = 0; j < n; j += WIDE) {
        int vectors = n - j > LANES ? 2 : 1;
        pack(j, std::min(n - j, WIDE), vectors, b);
        b += vectors * LANES * depth;
    }
}

// C, m x n over k. `strip(i, rows, k, depth, a)` writes a strip of A, `panels(j, n, k, depth, b)` those of B.
template <int I, int K, class Strip, class Panels>
inline void multiply(int m, int n, int k, Strip strip, Panels panels, float* c, int64_t stride) {
    if (!k) {
        for (int i = 0; i < m; ++i) std::fill_n(c + i * stride, n, 0.0f);
        return;
    }
    Workspace& own = workspace();
    const int blocks = (k + DEPTH - 1) / DEPTH, most = (k + blocks - 1) / blocks;
    const int at_once = PANELS / most / WIDE * WIDE;
    for (int j0 = 0; j0 < n; j0 += at_once) {
        const int columns = std::min(n - j0, at_once);
        for (int k0 = 0; k0 < k; k0 += most) {
            const int depth = std::min(k - k0, most);
            panels(j0, columns, k0, depth, own.b);
            for (int i = 0; i < m; i += ROWS) {
                const int rows = std::min(m - i, ROWS);
                strip(i, rows, k0, depth, own.a);
                const float* b = own.b;
                for (int j = 0; j < columns; j += WIDE) {
                    float* to = c + i * stride + j0 + j;
                    const int left = std::min(columns - j, WIDE);
                    if (left > LANES) {
                        tile_of<2, I, K>(rows, depth, own.a, b, to, stride, k0 > 0, left);
                        b += 2 * LANES * depth;
                    } else {
                        tile_of<1, I, K>(rows, depth, own.a, b, to, stride, k0 > 0, left);
                        b += LANES * depth;
                    }
                }
            }
        }
    }
}

// Columns j of a matrix of n columns, row by row.
inline void panels_of_rows(Rows right, int j0, int n, int k0, int depth, float* b) {
    pack_panels(n, depth, b, [&](int j, int columns, int vectors, float* to) {
        for (int k = 0; k < depth; ++k, to += vectors * LANES) {
            const float* from = right[k0 + k] + j0 + j;
            for (int v = 0; v < vectors; ++v) store(to + v * LANES, load(from + v * LANES, columns - v * LANES));
        }
    });
}

// The same of its transpose: row j of `right` is a column of B.
inline void panels_of_columns(Rows right, int j0, int n, int k0, int depth, float* b) {
    pack_panels(n, depth, b, [&](int j, int columns, int vectors, float* to) {
        for (int v = 0; v < vectors; ++v) {
            const int here = std::min(columns - v * LANES, LANES);
            for (int k = 0; k < depth; k += LANES) {
                const int deep = std::min(depth - k, LANES);
                Vector block[LANES] = {};
                for (int i = 0; i < here; ++i) block[i] = load(right[j0 + j + v * LANES + i] + k0 + k, deep);
                transpose(block);
                for (int i = 0; i < deep; ++i) store(to + (k + i) * vectors * LANES + v * LANES, block[i]);
            }
        }
    });
}

enum class Right { as_it_is, transposed };

// C = A B or A B^T; rows of A may be anywhere.
inline void multiply_rows(int m, int n, int k, Rows left, Rows right, Right how, float* c, int64_t stride) {
    auto strip = [&](int i, int rows, int k0, int depth, float* a) {
        for (int r = 0; r < rows; ++r) std::memcpy(a + r * STRIDE, left[i + r] + k0, 4 * depth);
    };
    auto panels = [&](int j, int columns, int k0, int depth, float* b) {
        if (how == Right::transposed) panels_of_columns(right, j, columns, k0, depth, b);
        else panels_of_rows(right, j, columns, k0, depth, b);
    };
    multiply<STRIDE, 1>(m, n, k, strip, panels, c, stride);
}

// C = A^T B over k rows; C has m rows, which are columns `first` and up of A.
inline void multiply_columns(int first, int m, int n, int k, Rows left, Rows right, float* c, int64_t stride) {
    auto strip = [&](int i, int rows, int k0, int depth, float* a) {
        for (int r = 0; r < depth; ++r) std::memcpy(a + r * ROWS, left[k0 + r] + first + i, 4 * rows);
    };
    auto panels = [&](int j, int columns, int k0, int depth, float* b) {
        panels_of_rows(right, j, columns, k0, depth, b);
    };
    multiply<1, ROWS>(m, n, k, strip, panels, c, stride);
}

}  // namespace smelt
