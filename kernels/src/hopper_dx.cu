// How does the Hopper tier compute each slot's part of the gradient of x, dx_SH = dpre W_gate_up?
//
// The k of this product counts the rows of W_gate_up[e] [2F, H], which are contiguous across it.
#include "hopper_tile.h"

namespace smelt::hopper {

template <class T>
SMELT_KERNEL(T::THREADS, T::BLOCKS)
void dx_kernel(DxArguments a) {
#if SMELT_HOPPER
  Place place;
  if (!locate(a.offs, a.tile0, a.E, a.S, T::ROWS, place)) return;
  const bool routed = place.expert >= 0;
  const int64_t depth = 2 * static_cast<int64_t>(a.F), first = place.columns * T::COLUMNS;
  const bf16* const w = a.w_gate_up + (routed ? place.expert : 0) * (depth * a.H);

  const auto slot = [&](int64_t s) -> const bf16* { return routed && s < place.last ? a.dpre + s * depth : nullptr; };
  const auto weight = [&](int64_t k) -> const bf16* { return k < depth ? w + k * a.H : nullptr; };
  AlongK<T::ROWS, T::THREADS, decltype(slot)> left(a.dpre, depth, place.first, slot);
  AcrossK<T::COLUMNS, T::THREADS, decltype(weight)> right(a.w_gate_up, a.H, first, weight);
  Products<T, true, decltype(left), decltype(right)> products(left, right, routed ? steps_of(depth) : 0, first, a.H);
  for (int64_t column = first; column < a.H; column += static_cast<int64_t>(gridDim.y) * T::COLUMNS) {
    Sums<T> sum;
    products.next(sum);
    store_bf16<T>(sum, a.dx, place.first, place.last, column, a.H);
  }
#endif
}

template <class T>
static int launch(const DxArguments& a) {
  const int64_t steps = tiles(2 * static_cast<int64_t>(a.F), K_STEP);
  const int64_t x = row_tiles_bound(a.S, a.E, T::ROWS), y = column_blocks(tiles(a.H, T::COLUMNS), steps);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((dx_kernel<T>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int dx(const DxArguments& a) {
  const bool tall = a.tile_rows == 128;
  switch (tile_columns(TIER, SMELT_DX, a.H)) {
    case 256: return tall ? launch<Tile<128, 256>>(a) : launch<Tile<64, 256>>(a);
    case 192: return tall ? launch<Tile<128, 192>>(a) : launch<Tile<64, 192>>(a);
    case 128: return tall ? launch<Tile<128, 128>>(a) : launch<Tile<64, 128>>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt::hopper
