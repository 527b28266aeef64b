// Which races of plain shared words, and which stores to one place in global memory, does the emulator find?
#include "device.h"

using namespace smelt;

namespace {

enum Bug : int { NONE, ONE_PLACE, NO_BARRIER_AFTER, OUTSIDE, NO_BARRIER_BEFORE };

// Each thread hands its number on to the one before, twice.
SMELT_KERNEL(96, 1)
void words_kernel(uint32_t* out, Bug bug) {
  SMELT_SHARED(shared);
  int* const words = reinterpret_cast<int*>(shared);
  const int mine = threadIdx.x, next = (threadIdx.x + 1) % 96;
  int value = mine;
  for (int turn = 0; turn < 2; ++turn) {
    store_shared(words + (bug == ONE_PLACE ? 7 : mine), value);
    if (bug != NO_BARRIER_AFTER) barrier();
    value = load_shared(words + (bug == OUTSIDE ? 96 : next));
    if (bug != NO_BARRIER_BEFORE) barrier();
  }
  store4(out + mine, value);
}

}  // namespace

extern "C" int probe_words(uint32_t* out, int bug) {
  return SMELT_LAUNCH(words_kernel, 1, 96, 96 * sizeof(int), nullptr, out, static_cast<Bug>(bug));
}

namespace {

enum StoreBug : int { RIGHT, TWO_BLOCKS, TWO_THREADS, OVERLAP, MISALIGNED };

// A row of 8 words for each block of 2 threads.
SMELT_KERNEL(2, 1)
void stores_kernel(uint32_t* out, StoreBug bug) {
  uint32_t* const row = out + blockIdx.x * 8;
  const uint32_t i = threadIdx.x;
  store16(row + 4 * i, uint4{i, i, i, i});
  barrier();
  store4(row + i, 10 + blockIdx.x);  // once more, after a barrier: allowed
  if (bug == TWO_BLOCKS && i == 0) store4(row + 8, 5);
  if (bug == TWO_THREADS) store4(row + 7, 5);
  if (bug == OVERLAP && i == 0) store8(row + 6, 5.f, 6.f);
  if (bug == OVERLAP && i == 1) store4(row + 7, 5);
  if (bug == MISALIGNED) store8(row + 1, 5u, 6u);
}

}  // namespace

extern "C" int probe_stores(uint32_t* out, int blocks, int bug) {
  return SMELT_LAUNCH(stores_kernel, dim3(blocks), 2, 0, nullptr, out, static_cast<StoreBug>(bug));
}
