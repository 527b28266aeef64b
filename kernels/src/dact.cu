// What are the gradients of gate, up and routing weight of each slot?
//
//     dh_SF   = grad W_down                        the gradient of h but for the routing weight w
//     dpre    = w dh (dh/dgate | dh/dup)           of the saved pre
//     hw      = w h                                for the gradient of W_down
//     partial = dh h, summed over the columns of one warp: a row for every warp and tile of columns
//
// Rows of grad are gathered: slot s reads row choice[s] / K.
#include "epilogue.h"
#include "grid.h"
#include "swiglu.h"
#include "tile.h"

namespace smelt {

template <int ROWS, int COLUMNS>
SMELT_KERNEL((Tile<ROWS, COLUMNS>::THREADS), (Tile<ROWS, COLUMNS>::BLOCKS))
void dact_kernel(DactArguments a) {
  using T = Tile<ROWS, COLUMNS>;
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const int64_t feature0 = place.columns * COLUMNS;
  const bf16* const w = a.w_down + (routed ? place.expert : 0) * (static_cast<int64_t>(a.H) * a.F);

  AlongK<ROWS, T::THREADS> tokens(a.grad, a.H, [&](int r) -> const bf16* {
    const int64_t s = place.first + r;
    return routed && s < place.last ? a.grad + a.choice[s] / a.K * a.ldg : nullptr;
  });
  const auto hidden_row = [=](int64_t k) -> const bf16* { return routed && k < a.H ? w + k * a.F : nullptr; };
  AcrossK<COLUMNS, T::THREADS, decltype(hidden_row)> weights(a.w_down, feature0, a.F, hidden_row);
  Sums<T> dh;
  multiply<T>(tokens, weights, routed ? k_steps(a.H) : 0, dh);

  const Warp<T> warp;
  SMELT_UNROLL
  for (int i = 0; i < T::M; ++i)
    SMELT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t s = place.first + warp.row + i * 16 + half * 8 + warp.lane / 4;
      const bool live = routed && s < place.last;  // what is not live becomes zero, whatever pre holds
      const float weight = live ? a.weight[a.choice[s]] : 0;
      float dweight = 0;
      SMELT_UNROLL
      for (int j = 0; j < T::N; j += 2) {  // two blocks of 8 features
        uint32_t dgate[2], dup[2], hw[2];
        SMELT_UNROLL
        for (int b = 0; b < 2; ++b) {
          const int64_t feature = feature0 + warp.column + (j + b) * 8 + warp.lane % 4 * 2;
          const bool inside = live && feature < a.F;
          const bf16* const pre = a.pre + s * 2 * a.F + feature;
          const uint32_t gate = inside ? load4(pre) : 0, up = inside ? load4(pre + a.F) : 0;
          const SwigluSlope x = swiglu_slope(low(gate), low(up)), y = swiglu_slope(high(gate), high(up));
          const float dx = dh[i][j + b][half * 2], dy = dh[i][j + b][half * 2 + 1];
          dweight += dx * x.h + dy * y.h;
          dgate[b] = pack(weight * dx * x.gate, weight * dy * y.gate);
          dup[b] = pack(weight * dx * x.up, weight * dy * y.up);
          hw[b] = pack(weight * x.h, weight * y.h);
        }
        const Quad dgates = swap_blocks(dgate[0], dgate[1], warp.lane), dups = swap_blocks(dup[0], dup[1], warp.lane),
                   hws = swap_blocks(hw[0], hw[1], warp.lane);
        const int64_t feature = feature0 + warp.column + j * 8 + quad_column(warp.lane);
        if (s >= place.last || feature >= a.F) continue;
        bf16* const dpre = a.dpre + s * 2 * a.F + feature;
        store8(dpre, dgates.low, dgates.high);
        store8(dpre + a.F, dups.low, dups.high);
        store8(a.hw + s * a.F + feature, hws.low, hws.high);
      }
      dweight += shuffle_xor(dweight, 1);
      dweight += shuffle_xor(dweight, 2);
      if (s < place.last && warp.lane % 4 == 0)
        store4(a.partial + (place.columns * T::WARPS_N + warp.number_n) * a.S + s, bits(dweight));
    }
}

template <int ROWS, int COLUMNS>
static int launch(const DactArguments& a) {
  using T = Tile<ROWS, COLUMNS>;
  static_assert(T::WARPS_N == dact_parts(80), "smelt_partials counts them");
  const int64_t x = row_tiles_bound(a.S, a.E, ROWS), y = tiles(a.F, COLUMNS);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((dact_kernel<ROWS, COLUMNS>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int portable::dact(const DactArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(80, SMELT_DACT, a.F)) {
    case 128: return tall ? launch<128, 128>(a) : launch<64, 128>(a);
    case 96: return tall ? launch<128, 96>(a) : launch<64, 96>(a);
    case 64: return tall ? launch<128, 64>(a) : launch<64, 64>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt
