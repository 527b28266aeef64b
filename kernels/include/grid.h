// Which rows and columns does a block compute?
//
// Tiles of rows lie on grid.x, which may have 2^31 - 1 blocks, tiles of columns on grid.y. Nobody asks the device how
// many tiles of rows there are: the grid is the upper bound ceil(S / R) + min(E, S), and what is left over takes the
// spare slots. With c_e slots an expert, sum of ceil(c_e / R) <= offs[E] / R + (R - 1) / R min(E, S), so the tiles left
// over hold at least S - offs[E] slots.
//
// Blocks start in order of x, then y. They are renumbered so that all tiles of columns of a tile of rows come one after
// the other: the rows they share, gathered from all over the tokens, are then in L2 for all but the first. The weights
// of an expert stay there by themselves, a few hundred tiles are under way at once.
#pragma once
#include "device.h"
#include "stages.h"

namespace smelt {

constexpr int64_t tiles(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

inline int64_t row_tiles_bound(int64_t S, int E, int tile_rows) { return tiles(S, tile_rows) + (E < S ? E : S); }

// Of a grid; SMELT_BAD_ARGUMENT where it has no room.
inline bool fits_grid(int64_t x, int64_t y) { return x <= INT32_MAX && y <= 65535; }

struct Place {
  int expert;           // -1: the slots are spare
  int64_t first, last;  // slots first <= s < last, at most one tile of them
  int64_t columns;      // which tile of columns
};

// False where the block has nothing to do. tile_rows slots a tile.
SMELT_DEVICE bool locate(const int* offs, const int* tile0, int E, int64_t S, int tile_rows, Place& place) {
  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t tile = block / gridDim.y;
  place.columns = block % gridDim.y;
  if (tile >= tile0[E]) {
    place.expert = -1;
    place.first = offs[E] + (tile - tile0[E]) * tile_rows;
    place.last = place.first + tile_rows < S ? place.first + tile_rows : S;
    return place.first < S;
  }
  int low = 0, high = E;  // the last expert whose first tile is not after this one; those without slots own none
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (tile0[middle] <= tile)
      low = middle;
    else
      high = middle;
  }
  place.expert = low;
  place.first = offs[low] + (tile - tile0[low]) * tile_rows;
  const int64_t end = offs[low + 1];
  place.last = place.first + tile_rows < end ? place.first + tile_rows : end;
  return true;
}

}  // namespace smelt
