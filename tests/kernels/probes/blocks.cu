// How are blocks run, and which are not? What they find in shared memory, who comes when, and what a GPU refuses.
#include "device.h"

using namespace smelt;

// ldmatrix of rows `pitch` bytes apart: the ways of its bank conflicts are counted.
SMELT_KERNEL(32, 1)
void banks_kernel(uint32_t* out, int pitch) {
  SMELT_SHARED(shared);
  uint32_t r[4];
  load_matrix4(r, shared + threadIdx.x * pitch);
  store16(out + threadIdx.x * 4, uint4{r[0], r[1], r[2], r[3]});
}

extern "C" int probe_banks(uint32_t* out, int pitch) {
  return SMELT_LAUNCH(banks_kernel, 1, 32, 31 * pitch + 16, nullptr, out, pitch);
}

// What stands in shared memory at first; each block leaves ones behind.
SMELT_KERNEL(32, 1)
void poison_kernel(uint32_t* out) {
  SMELT_SHARED(shared);
  int* const word = reinterpret_cast<int*>(shared) + threadIdx.x;
  store4(out + blockIdx.x * 32 + threadIdx.x, load_shared(word));
  store_shared(word, 1);
}

extern "C" int probe_poison(uint32_t* out, int blocks) {
  return SMELT_LAUNCH(poison_kernel, dim3(blocks), 32, 128, nullptr, out);
}

// What a thread's copy has brought before its wait: data, or what was there before. Not through load_shared, which
// refuses.
SMELT_KERNEL(32, 1)
void landing_kernel(const uint32_t* in, uint32_t* out) {
  SMELT_SHARED(shared);
  unsigned char* const chunk = shared + threadIdx.x * 16;
  copy_async16(chunk, in, 16);
  store4(out + threadIdx.x, *reinterpret_cast<volatile uint32_t*>(chunk));
  commit_copies();
  wait_copies<0>();
  store4(out + 32 + threadIdx.x, load_shared(reinterpret_cast<int*>(chunk)));
}

extern "C" int probe_landing(const uint32_t* in, uint32_t* out) {
  return SMELT_LAUNCH(landing_kernel, 1, 32, 512, nullptr, in, out);
}

// Each thread appends its number, on one host thread.
SMELT_KERNEL(64, 1)
void order_kernel(int* out, int* count) { out[(*count)++] = blockIdx.x * 64 + threadIdx.x; }

extern "C" int probe_order(int* out, int blocks) {
  int count = 0;
  return SMELT_LAUNCH(order_kernel, dim3(blocks), 64, 0, nullptr, out, &count);
}

// Numbers of every thread and block, 6 words each, in the order of CUDA.
SMELT_KERNEL(24, 1)
void index_kernel(unsigned* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  unsigned* const mine = out + (block * 24 + thread) * 6;
  mine[0] = blockIdx.x, mine[1] = blockIdx.y, mine[2] = blockIdx.z;
  mine[3] = threadIdx.x, mine[4] = threadIdx.y, mine[5] = threadIdx.z;
}

extern "C" int probe_index(unsigned* out) {
  return SMELT_LAUNCH(index_kernel, dim3(2, 3, 4), dim3(2, 3, 4), 0, nullptr, out);
}

SMELT_KERNEL(1024, 1)
void nothing_kernel(int) {}

// Grid, block and bytes of shared memory.
extern "C" int probe_launch(const unsigned* sizes) {
  const dim3 grid(sizes[0], sizes[1], sizes[2]), block(sizes[3], sizes[4], sizes[5]);
  return SMELT_LAUNCH(nothing_kernel, grid, block, sizes[6], nullptr, 0);
}

extern "C" const char* probe_message(int code) { return message(code); }
