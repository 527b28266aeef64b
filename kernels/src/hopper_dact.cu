// How does the Hopper tier compute the gradients of gate, up and routing weight of each slot?
//
//     dh_SF   = grad W_down                        the gradient of h but for the routing weight w
//     dpre    = w dh (dh/dgate | dh/dup)           of the saved pre
//     hw      = w h                                for the gradient of W_down
//     partial = dh h, summed over the columns of a tile: a row for every tile of columns
//
// Rows of grad are gathered: slot s reads row choice[s] / K. The k of this product counts the rows of W_down[e] [H, F],
// which are contiguous across it.
#include "hopper_tile.h"
#include "swiglu.h"

namespace smelt::hopper {

// dpre, hw and partial of a tile whose first feature is `feature0`.
template <class T>
SMELT_DEVICE void store_gradients(const Sums<T>& dh, const DactArguments& a, const Place& place, int64_t feature0) {
  SMELT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t s = place.first + row_of(half);
    const bool live = place.expert >= 0 && s < place.last;  // what is not live becomes zero, whatever pre holds
    const float weight = live ? a.weight[a.choice[s]] : 0;
    float dweight = 0;
    SMELT_UNROLL
    for (int j = 0; j < T::COLUMNS / 8; j += 4) {
      float left[4], right[4];  // of two columns
      SMELT_UNROLL
      for (int i = 0; i < 4; ++i) {
        left[i] = dh[(j + i) * 4 + half * 2];
        right[i] = dh[(j + i) * 4 + half * 2 + 1];
      }
      gather_fragment(left);
      gather_fragment(right);
      const int64_t feature = feature0 + j * 8 + threadIdx.x % 4 * 8;
      if (s >= place.last || feature >= a.F) continue;
      const bf16* const pre = a.pre + s * 2 * a.F + feature;
      const uint4 gates = live ? load16(pre) : uint4{0, 0, 0, 0}, ups = live ? load16(pre + a.F) : uint4{0, 0, 0, 0};
      const uint32_t gate[4] = {gates.x, gates.y, gates.z, gates.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
      uint32_t dgate[4], dup[4], hw[4];
      SMELT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const SwigluSlope x = swiglu_slope(low(gate[i]), low(up[i])), y = swiglu_slope(high(gate[i]), high(up[i]));
        dweight += left[i] * x.h + right[i] * y.h;
        dgate[i] = pack(weight * left[i] * x.gate, weight * right[i] * y.gate);
        dup[i] = pack(weight * left[i] * x.up, weight * right[i] * y.up);
        hw[i] = pack(weight * x.h, weight * y.h);
      }
      bf16* const dpre = a.dpre + s * 2 * a.F + feature;
      store16(dpre, vector(dgate));
      store16(dpre + a.F, vector(dup));
      store16(a.hw + s * a.F + feature, vector(hw));
    }
    dweight += shuffle_xor(dweight, 1);
    dweight += shuffle_xor(dweight, 2);
    if (s < place.last && threadIdx.x % 4 == 0) a.partial[feature0 / T::COLUMNS * a.S + s] = dweight;
  }
}

template <class T>
SMELT_KERNEL(T::THREADS, T::BLOCKS)
void dact_kernel(DactArguments a) {
#if SMELT_HOPPER
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, T::ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const bf16* const w = a.w_down + (routed ? place.expert : 0) * (static_cast<int64_t>(a.H) * a.F);

  const auto token = [&](int64_t s) -> const bf16* {
    return routed && s < place.last ? a.grad + a.choice[s] / a.K * a.ldg : nullptr;
  };
  const auto weight = [&](int64_t k) -> const bf16* { return k < a.H ? w + k * a.F : nullptr; };
  const int64_t first = place.columns * T::COLUMNS;
  AlongK<T::ROWS, T::THREADS, decltype(token)> left(a.grad, a.H, place.first, token);
  AcrossK<T::COLUMNS, T::THREADS, decltype(weight)> right(a.w_down, a.F, first, weight);
  Products<T, false, decltype(left), decltype(right)> products(left, right, routed ? steps_of(a.H) : 0, first, a.F);
  Sums<T> dh;
  products.next(dh);
  store_gradients<T>(dh, a, place, first);
#endif
}

template <class T>
static int launch(const DactArguments& a) {
  const int64_t x = row_tiles_bound(a.S, a.E, T::ROWS), y = tiles(a.F, T::COLUMNS);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((dact_kernel<T>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int dact(const DactArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(TIER, SMELT_DACT, a.F)) {
    case 256: return tall ? launch<Tile<128, 256>>(a) : launch<Tile<64, 256>>(a);
    case 128: return tall ? launch<Tile<128, 128>>(a) : launch<Tile<64, 128>>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt::hopper
