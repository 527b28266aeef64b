// Which tile for which problem? One table for both tiers.
//
// Rows of a tile are slots of one expert. 128 of them read a weight half as often as 64, but the last tile of an expert
// is half empty on average: 64 wasted rows of S / E, against 32. From 512 rows an expert on that is an eighth at most.
//
// Columns: of those that the table has for the stage, the one that pads least; of equals the first, which is the widest
// and gathers a row of the other operand the fewest times. "up" counts the columns of gate and up, 2F together.
#pragma once
#include <stdint.h>

#include "abi.h"

namespace smelt {

constexpr int MANY_ROWS = 512;  // of an expert

struct TileWidth {
  int tier, stage, columns;
  const char* reason;
};

constexpr TileWidth TILE_WIDTHS[] = {
    {80, SMELT_UP, 256, "F = 128 is one tile: x is gathered once"},
    {80, SMELT_UP, 128, "F = 192, 320: no column wasted"},
    {80, SMELT_UP, 64, "F up to 32"},
    {80, SMELT_DOWN, 128, "H in multiples of 128, where most models are"},
    {80, SMELT_DOWN, 96, "H = 1056 = 11 x 96; tiles of 128 would waste 9 %"},
    {80, SMELT_DOWN, 64, "narrow test models"},
    {80, SMELT_DACT, 128, "F = 128 is one tile: the gradient is gathered once"},
    {80, SMELT_DACT, 96, "F = 96, 192"},
    {80, SMELT_DACT, 64, "F up to 64"},
    {80, SMELT_DX, 128, "as down"},
    {80, SMELT_DX, 96, "as down"},
    {80, SMELT_DX, 64, "as down"},
    {80, SMELT_WGRAD_UP, 128, "rows and columns of a weight gradient, which are 2F, F or H"},
    {80, SMELT_WGRAD_UP, 96, "H = 1056"},
    {80, SMELT_WGRAD_UP, 64, "F up to 64"},
    {90, SMELT_UP, 256, "F = 128 is one tile: x is gathered once"},
    {90, SMELT_UP, 128, "F = 192, 320: no column wasted"},
    {90, SMELT_DOWN, 256, "H in multiples of 256, where most models are"},
    {90, SMELT_DOWN, 176, "H = 1056 = 6 x 176"},
    {90, SMELT_DOWN, 128, "H in odd multiples of 128"},
    {90, SMELT_DOWN, 96, "H = 96, 288, 480"},
    {90, SMELT_DACT, 256, "F = 256 is one tile: the gradient is gathered once"},
    {90, SMELT_DACT, 128, "F = 128 is one tile"},
    {90, SMELT_DX, 256, "as down; columns contiguous in memory come in blocks of 64"},
    {90, SMELT_DX, 192, "H = 1056 in 6 tiles, the last of them half empty"},
    {90, SMELT_DX, 128, "as down"},
    {90, SMELT_WGRAD_UP, 256, "columns of a weight gradient, which are H or F; the rows are always 128"},
    {90, SMELT_WGRAD_UP, 192, "as dx"},
    {90, SMELT_WGRAD_UP, 128, "as down and dact"},
};

constexpr int tile_rows(int tier, int64_t S, int E) {
  return tier != 80 && tier != 90 ? 0 : E > 0 && S / E >= MANY_ROWS ? 128 : 64;
}

// A row of `partial` for each warp along a tile's columns: of tier 90 one warp has them all.
constexpr int dact_parts(int tier) { return tier == 80 ? 2 : 1; }

// 0 where the table has none. Both weight gradients go by SMELT_WGRAD_UP: the kernel is told rows and columns only.
constexpr int tile_columns(int tier, int stage, int64_t width) {
  int best = 0;
  int64_t padded = 0;
  for (const TileWidth& row : TILE_WIDTHS) {
    if (row.tier != tier || row.stage != (stage == SMELT_WGRAD_DOWN ? SMELT_WGRAD_UP : stage)) continue;
    int64_t wide = (width + row.columns - 1) / row.columns * row.columns;
    if (best == 0 || wide < padded) {
      best = row.columns;
      padded = wide;
    }
  }
  return best;
}

// What the columns of a stage's tile divide.
constexpr int64_t stage_width(int stage, int H, int F) {
  return stage == SMELT_UP ? 2 * static_cast<int64_t>(F) : stage == SMELT_DACT || stage == SMELT_WGRAD_DOWN ? F : H;
}

}  // namespace smelt
