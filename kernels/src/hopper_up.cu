// How does the Hopper tier compute gate and up of each slot, and SwiGLU of them?
//
//     pre_S2F = [x W_gate^T | x W_up^T]    h_SF = gate sigmoid(gate) up        (arXiv:2002.05202 eq. 6)
//
// Rows of x are gathered: slot s reads row choice[s] / K. In the tile of weights 8 rows of W_gate alternate with the
// same 8 rows of W_up, so that a thread's sums of fragment j are gates and those of fragment j + 1 the ups of the same
// features.
#include "hopper_tile.h"
#include "swiglu.h"

namespace smelt::hopper {

// pre and h of a tile whose first feature is `feature0`.
template <class T>
SMELT_DEVICE void store_activation(const Sums<T>& sum, const UpArguments& a, const Place& place, int64_t feature0) {
  SMELT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t s = place.first + row_of(half);
    SMELT_UNROLL
    for (int j = 0; j < T::COLUMNS / 8; j += 8) {  // four fragments of gate and four of up
      uint32_t gate[4], up[4], h[4];
      SMELT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* const two = sum + (j + 2 * i) * 4 + half * 2;
        gate[i] = pack(two[0], two[1]);
        up[i] = pack(two[4], two[5]);
      }
      gather_fragment(gate);
      gather_fragment(up);
      const int64_t feature = feature0 + j * 4 + threadIdx.x % 4 * 8;
      if (s >= place.last || feature >= a.F) continue;
      SMELT_UNROLL
      for (int i = 0; i < 4; ++i)  // from the rounded sums, as backward will see them
        h[i] = pack(swiglu(low(gate[i]), low(up[i])), swiglu(high(gate[i]), high(up[i])));
      bf16* const pre = a.pre + s * 2 * a.F + feature;
      store16(pre, vector(gate));
      store16(pre + a.F, vector(up));
      store16(a.h + s * a.F + feature, vector(h));
    }
  }
}

template <class T>
SMELT_KERNEL(T::THREADS, T::BLOCKS)
void up_kernel(UpArguments a) {
#if SMELT_HOPPER
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, T::ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const bf16* const w = a.w_gate_up + (routed ? place.expert : 0) * (2 * static_cast<int64_t>(a.F) * a.H);

  const auto token = [&](int64_t s) -> const bf16* {
    return routed && s < place.last ? a.x + a.choice[s] / a.K * a.ldx : nullptr;
  };
  const auto weight = [&](int64_t column) -> const bf16* {
    const int64_t feature = column / 16 * 8 + column % 8;
    return feature < a.F ? w + (column % 16 < 8 ? feature : a.F + feature) * a.H : nullptr;
  };
  const int64_t width = 2 * static_cast<int64_t>(a.F), first = place.columns * T::COLUMNS;
  AlongK<T::ROWS, T::THREADS, decltype(token)> left(a.x, a.H, place.first, token);
  AlongK<T::COLUMNS, T::THREADS, decltype(weight)> right(a.w_gate_up, a.H, first, weight);
  Products<T, false, decltype(left), decltype(right)> products(left, right, routed ? steps_of(a.H) : 0, first, width);
  Sums<T> sum;
  products.next(sum);
  store_activation<T>(sum, a, place, first / 2);
#endif
}

template <class T>
static int launch(const UpArguments& a) {
  const int64_t x = row_tiles_bound(a.S, a.E, T::ROWS), y = tiles(a.F, T::COLUMNS / 2);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((up_kernel<T>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int up(const UpArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(TIER, SMELT_UP, stage_width(SMELT_UP, a.H, a.F))) {
    case 256: return tall ? launch<Tile<128, 256>>(a) : launch<Tile<64, 256>>(a);
    case 128: return tall ? launch<Tile<128, 128>>(a) : launch<Tile<64, 128>>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt::hopper
