// What is the gradient of each slot's row of x?
//
//     dx_SH = dpre_S2F W_gate_up
//
// Token n's gradient is the sum of its K rows: smelt_combine without weight, the routing weight is in dpre.
#include "epilogue.h"
#include "grid.h"
#include "tile.h"

namespace smelt {

template <int ROWS, int COLUMNS>
SMELT_KERNEL((Tile<ROWS, COLUMNS>::THREADS), (Tile<ROWS, COLUMNS>::BLOCKS))
void dx_kernel(DxArguments a) {
  using T = Tile<ROWS, COLUMNS>;
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const int64_t column0 = place.columns * COLUMNS;
  const int64_t features = 2 * static_cast<int64_t>(a.F);
  const bf16* const w = a.w_gate_up + (routed ? place.expert : 0) * (features * a.H);

  AlongK<ROWS, T::THREADS> slots(a.dpre, features, [&](int r) -> const bf16* {
    const int64_t s = place.first + r;
    return routed && s < place.last ? a.dpre + s * features : nullptr;
  });
  const auto feature_row = [=](int64_t k) -> const bf16* { return routed && k < features ? w + k * a.H : nullptr; };
  AcrossK<COLUMNS, T::THREADS, decltype(feature_row)> weights(a.w_gate_up, column0, a.H, feature_row);
  Sums<T> c;
  multiply<T>(slots, weights, routed ? k_steps(features) : 0, c);
  store_rows<T>(c, a.dx, place.first, place.last, column0, a.H);
}

template <int ROWS, int COLUMNS>
static int launch(const DxArguments& a) {
  using T = Tile<ROWS, COLUMNS>;
  const int64_t x = row_tiles_bound(a.S, a.E, ROWS), y = tiles(a.H, COLUMNS);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((dx_kernel<ROWS, COLUMNS>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int portable::dx(const DxArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(80, SMELT_DX, a.H)) {
    case 128: return tall ? launch<128, 128>(a) : launch<64, 128>(a);
    case 96: return tall ? launch<128, 96>(a) : launch<64, 96>(a);
    case 64: return tall ? launch<128, 64>(a) : launch<64, 64>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt
