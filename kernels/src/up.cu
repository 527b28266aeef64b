// What are gate and up of each slot, and what does SwiGLU make of them?
//
//     pre_S2F = [x W_gate^T | x W_up^T]    h_SF = gate sigmoid(gate) up        (arXiv:2002.05202 eq. 6)
//
// Rows of x are gathered: slot s reads row choice[s] / K. In the tile of weights 8 rows of W_gate alternate with the
// same 8 rows of W_up, so that a thread's sums of block j are gates and those of block j + 1 the ups of the same
// features.
#include "epilogue.h"
#include "grid.h"
#include "swiglu.h"
#include "tile.h"

namespace smelt {

template <int ROWS, int COLUMNS>
SMELT_KERNEL((Tile<ROWS, COLUMNS>::THREADS), (Tile<ROWS, COLUMNS>::BLOCKS))
void up_kernel(UpArguments a) {
  using T = Tile<ROWS, COLUMNS>;
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const int64_t feature0 = place.columns * (COLUMNS / 2);
  const bf16* const w = a.w_gate_up + (routed ? place.expert : 0) * (2 * static_cast<int64_t>(a.F) * a.H);

  AlongK<ROWS, T::THREADS> tokens(a.x, a.H, [&](int r) -> const bf16* {
    const int64_t s = place.first + r;
    return routed && s < place.last ? a.x + a.choice[s] / a.K * a.ldx : nullptr;
  });
  AlongK<COLUMNS, T::THREADS> weights(a.w_gate_up, a.H, [&](int r) -> const bf16* {
    const int64_t feature = feature0 + r / 16 * 8 + r % 8;
    return feature < a.F ? w + (r % 16 < 8 ? feature : a.F + feature) * a.H : nullptr;
  });
  Sums<T> c;
  multiply<T>(tokens, weights, routed ? k_steps(a.H) : 0, c);

  const Warp<T> warp;
  SMELT_UNROLL
  for (int i = 0; i < T::M; ++i)
    SMELT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t s = place.first + warp.row + i * 16 + half * 8 + warp.lane / 4;
      SMELT_UNROLL
      for (int j = 0; j < T::N; j += 4) {  // two blocks of 8 features
        uint32_t gate[2], up[2], h[2];
        SMELT_UNROLL
        for (int b = 0; b < 2; ++b) {
          const float(&g)[4] = c[i][j + 2 * b], (&u)[4] = c[i][j + 2 * b + 1];
          gate[b] = pack(g[half * 2], g[half * 2 + 1]);
          up[b] = pack(u[half * 2], u[half * 2 + 1]);
          // from the rounded sums, as backward will see them
          h[b] = pack(swiglu(low(gate[b]), low(up[b])), swiglu(high(gate[b]), high(up[b])));
        }
        const Quad gates = swap_blocks(gate[0], gate[1], warp.lane), ups = swap_blocks(up[0], up[1], warp.lane),
                   hs = swap_blocks(h[0], h[1], warp.lane);
        const int64_t feature = feature0 + warp.column / 2 + j * 4 + quad_column(warp.lane);
        if (s >= place.last || feature >= a.F) continue;
        bf16* const pre = a.pre + s * 2 * a.F + feature;
        store8(pre, gates.low, gates.high);
        store8(pre + a.F, ups.low, ups.high);
        store8(a.h + s * a.F + feature, hs.low, hs.high);
      }
    }
}

template <int ROWS, int COLUMNS>
static int launch(const UpArguments& a) {
  using T = Tile<ROWS, COLUMNS>;
  const int64_t x = row_tiles_bound(a.S, a.E, ROWS), y = tiles(a.F, COLUMNS / 2);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((up_kernel<ROWS, COLUMNS>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int portable::up(const UpArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(80, SMELT_UP, stage_width(SMELT_UP, a.H, a.F))) {
    case 256: return tall ? launch<128, 256>(a) : launch<64, 256>(a);
    case 128: return tall ? launch<128, 128>(a) : launch<64, 128>(a);
    case 64: return tall ? launch<128, 64>(a) : launch<64, 64>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt
