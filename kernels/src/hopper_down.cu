// How does the Hopper tier compute each slot's row of out_SH = h W_down^T?
//
// Rows of W_down[e] [H, F] are contiguous along the k of this product, F.
#include "hopper_tile.h"

namespace smelt::hopper {

template <class T>
SMELT_KERNEL(T::THREADS, T::BLOCKS)
void down_kernel(DownArguments a) {
#if SMELT_HOPPER
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, T::ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const bf16* const w = a.w_down + (routed ? place.expert : 0) * (static_cast<int64_t>(a.H) * a.F);

  const auto slot = [&](int64_t s) -> const bf16* { return routed && s < place.last ? a.h + s * a.F : nullptr; };
  const auto weight = [&](int64_t hidden) -> const bf16* { return hidden < a.H ? w + hidden * a.F : nullptr; };
  const int64_t first = place.columns * T::COLUMNS;
  AlongK<T::ROWS, T::THREADS, decltype(slot)> left(a.h, a.F, place.first, slot);
  AlongK<T::COLUMNS, T::THREADS, decltype(weight)> right(a.w_down, a.F, first, weight);
  Products<T, true, decltype(left), decltype(right)> products(left, right, routed ? steps_of(a.F) : 0, first, a.H);
  for (int64_t column = first; column < a.H; column += static_cast<int64_t>(gridDim.y) * T::COLUMNS) {
    Sums<T> sum;
    products.next(sum);
    store_bf16<T>(sum, a.out, place.first, place.last, column, a.H);
  }
#endif
}

template <class T>
static int launch(const DownArguments& a) {
  const int64_t x = row_tiles_bound(a.S, a.E, T::ROWS), y = column_blocks(tiles(a.H, T::COLUMNS), tiles(a.F, K_STEP));
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((down_kernel<T>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int down(const DownArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(TIER, SMELT_DOWN, a.H)) {
    case 256: return tall ? launch<Tile<128, 256>>(a) : launch<Tile<64, 256>>(a);
    case 176: return tall ? launch<Tile<128, 176>>(a) : launch<Tile<64, 176>>(a);
    case 128: return tall ? launch<Tile<128, 128>>(a) : launch<Tile<64, 128>>(a);
    case 96: return tall ? launch<Tile<128, 96>>(a) : launch<Tile<64, 96>>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt::hopper
