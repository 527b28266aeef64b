// What does an expert return for each of its slots?
//
//     out_SH = h_SF W_down^T
#include "epilogue.h"
#include "grid.h"
#include "tile.h"

namespace smelt {

template <int ROWS, int COLUMNS>
SMELT_KERNEL((Tile<ROWS, COLUMNS>::THREADS), (Tile<ROWS, COLUMNS>::BLOCKS))
void down_kernel(DownArguments a) {
  using T = Tile<ROWS, COLUMNS>;
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const int64_t column0 = place.columns * COLUMNS;
  const bf16* const w = a.w_down + (routed ? place.expert : 0) * (static_cast<int64_t>(a.H) * a.F);

  AlongK<ROWS, T::THREADS> slots(a.h, a.F, [&](int r) -> const bf16* {
    const int64_t s = place.first + r;
    return routed && s < place.last ? a.h + s * a.F : nullptr;
  });
  AlongK<COLUMNS, T::THREADS> weights(a.w_down, a.F, [&](int r) -> const bf16* {
    return column0 + r < a.H ? w + (column0 + r) * a.F : nullptr;
  });
  Sums<T> c;
  multiply<T>(slots, weights, routed ? k_steps(a.F) : 0, c);
  store_rows<T>(c, a.out, place.first, place.last, column0, a.H);
}

template <int ROWS, int COLUMNS>
static int launch(const DownArguments& a) {
  using T = Tile<ROWS, COLUMNS>;
  const int64_t x = row_tiles_bound(a.S, a.E, ROWS), y = tiles(a.H, COLUMNS);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((down_kernel<ROWS, COLUMNS>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int portable::down(const DownArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(80, SMELT_DOWN, a.H)) {
    case 128: return tall ? launch<128, 128>(a) : launch<64, 128>(a);
    case 96: return tall ? launch<128, 96>(a) : launch<64, 96>(a);
    case 64: return tall ? launch<128, 64>(a) : launch<64, 64>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt
