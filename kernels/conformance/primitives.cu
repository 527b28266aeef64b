// What does each primitive of device.h and hopper.h do to given bits? One kernel each, one case a block, raw words out:
// compiled for the GPU and for the emulator, and compared by conformance.py.
//
// A case is IN words in and OUT words out (uint32); what they hold is said beside each kernel.
#include "device.h"
#include "hopper.h"

namespace smelt {
namespace {

// In: 32 rows of 16 bytes. Out: 4 registers a lane. Lane l names row (7 l + 3) % 32.
template <bool TRANSPOSED>
SMELT_KERNEL(32, 1)
void load_matrix_kernel(const uint32_t* in, uint32_t* out) {
  SMELT_SHARED(shared);
  const int lane = threadIdx.x;
  copy_async16(shared + lane * 16, in + blockIdx.x * 128 + lane * 4, 16);
  commit_copies();
  wait_copies<0>();
  barrier();
  uint32_t r[4];
  const unsigned char* const row = shared + (7 * lane + 3) % 32 * 16;
  if (TRANSPOSED)
    load_matrix4_transposed(r, row);
  else
    load_matrix4(r, row);
  store16(out + (blockIdx.x * 32 + lane) * 4, uint4{r[0], r[1], r[2], r[3]});
}

// In, a lane: a[4], b0, b1, c[4], 2 words unused. Out, a lane: c[4].
SMELT_KERNEL(32, 1) void mma_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t* const mine = in + (blockIdx.x * 32 + threadIdx.x) * 12;
  const uint32_t a[4] = {mine[0], mine[1], mine[2], mine[3]};
  float c[4] = {from_bits(mine[6]), from_bits(mine[7]), from_bits(mine[8]), from_bits(mine[9])};
  mma(c, a, mine[4], mine[5]);
  store16(out + (blockIdx.x * 32 + threadIdx.x) * 4, uint4{bits(c[0]), bits(c[1]), bits(c[2]), bits(c[3])});
}

// In: 17 chunks of 16 bytes. Out: the same after a copy of 0, 1, ... 16 bytes each.
SMELT_KERNEL(32, 1) void copy_kernel(const uint32_t* in, uint32_t* out) {
  SMELT_SHARED(shared);
  const int i = threadIdx.x;
  if (i < 17) copy_async16(shared + i * 16, in + (blockIdx.x * 17 + i) * 4, i);
  commit_copies();
  wait_copies<0>();
  barrier();
  if (i < 17)
    for (int word = 0; word < 4; ++word)
      store4(out + (blockIdx.x * 17 + i) * 4 + word, load_shared(reinterpret_cast<const int*>(shared) + i * 4 + word));
}

// In, a lane: two floats. Out, a lane: their bf16 pair, and both halves of it as floats, and one word unused.
SMELT_KERNEL(32, 1) void pack_kernel(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  const uint32_t pair = pack(from_bits(in[2 * i]), from_bits(in[2 * i + 1]));
  store16(out + 4 * i, uint4{pair, bits(low(pair)), bits(high(pair)), 0});
}

// In, a lane: a float. Out, a lane: its exponential.
SMELT_KERNEL(32, 1) void exponential_kernel(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  store4(out + i, bits(exponential(from_bits(in[i]))));
}

// In, a lane: a word. Out, 10 words a lane: shuffled by xor 1, 2, 4, 8, 16 and up by 1, 2, 4, 8, 16.
SMELT_KERNEL(32, 1) void shuffle_kernel(const uint32_t* in, uint32_t* out) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  for (int step = 0; step < 5; ++step) {
    store4(out + 10 * i + step, shuffle_xor(in[i], 1 << step));
    store4(out + 10 * i + 5 + step, shuffle_up(static_cast<int>(in[i]), 1 << step));
  }
}

// In, a lane: 8 words. Out: the same, through the loads and stores of 4, 8 and 16 bytes and the shared word.
SMELT_KERNEL(32, 1) void move_kernel(const uint32_t* in, uint32_t* out) {
  SMELT_SHARED(shared);
  const int i = blockIdx.x * 32 + threadIdx.x;
  int* const word = reinterpret_cast<int*>(shared) + threadIdx.x;
  store16(out + 8 * i, load16(in + 8 * i));
  store4(out + 8 * i + 4, load4(in + 8 * i + 4));
  store_shared(word, static_cast<int>(in[8 * i + 5]));
  store4(out + 8 * i + 5, load_shared(word));
  store8(out + 8 * i + 6, in[8 * i + 6], in[8 * i + 7]);
}

#if SMELT_HOPPER
// A tile of 64 k and `rows` m (or n) in the 128-byte swizzle, by all 128 threads. K-major: in is [rows][64], rows of 8
// an atom. MN-major: in is [64][rows], rows a multiple of 16, each 64 of them a block of 64 k x 128 bytes.
SMELT_DEVICE void fill(unsigned char* tile, const uint32_t* in, int rows, bool mn_major) {
  const int chunks = mn_major ? rows / 8 : 8, lines = mn_major ? 64 : rows;
  for (int i = threadIdx.x; i < lines * chunks; i += 128) {
    const int line = i / chunks, chunk = i % chunks;
    copy_async16(tile + chunk / 8 * 8192 + line * 128 + (chunk % 8 ^ line % 8) * 16, in + i * 4, 16);
  }
}
#endif

// In: a [64 m][64 k], b [COLUMNS n][64 k], both with k and the other swapped if MN-major, as bf16; then d, COLUMNS / 2
// words a thread. Out: d after four steps of k, COLUMNS / 2 words a thread. One block of 128 threads.
template <int COLUMNS, bool A_MN, bool B_MN>
SMELT_KERNEL(128, 1)
void wgmma_kernel(const uint32_t* in, uint32_t* out) {
#if SMELT_HOPPER
  SMELT_SHARED(shared);
  unsigned char* const right = shared + 8192;
  const uint32_t* const case_in = in + blockIdx.x * (2048 + 96 * COLUMNS);
  const uint32_t* const d_in = case_in + 2048 + 32 * COLUMNS + threadIdx.x * (COLUMNS / 2);
  fill(shared, case_in, 64, A_MN);
  fill(right, case_in + 2048, COLUMNS, B_MN);
  commit_copies();
  wait_copies<0>();
  fence_async();
  barrier();
  float d[COLUMNS / 2];
  SMELT_UNROLL
  for (int i = 0; i < COLUMNS / 2; ++i) d[i] = from_bits(d_in[i]);
  hold(d);
  wgmma_fence();
  SMELT_UNROLL
  for (int k = 0; k < 4; ++k)
    wgmma<COLUMNS, A_MN, B_MN>(d, descriptor(shared + k * (A_MN ? 2048 : 32), A_MN, 8192),
                               descriptor(right + k * (B_MN ? 2048 : 32), B_MN, 8192));
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
  uint32_t* const d_out = out + (blockIdx.x * 128 + threadIdx.x) * (COLUMNS / 2);
  SMELT_UNROLL
  for (int i = 0; i < COLUMNS / 2; ++i) store4(d_out + i, bits(d[i]));
#endif
}

template <int COLUMNS>
int launch_wgmma(int a_mn, int b_mn, const uint32_t* in, uint32_t* out, int cases, void* stream) {
  constexpr int BYTES = 8192 + (COLUMNS + 63) / 64 * 8192;
  if (a_mn && b_mn) return SMELT_LAUNCH((wgmma_kernel<COLUMNS, true, true>), dim3(cases), 128, BYTES, stream, in, out);
  if (a_mn) return SMELT_LAUNCH((wgmma_kernel<COLUMNS, true, false>), dim3(cases), 128, BYTES, stream, in, out);
  if (b_mn) return SMELT_LAUNCH((wgmma_kernel<COLUMNS, false, true>), dim3(cases), 128, BYTES, stream, in, out);
  return SMELT_LAUNCH((wgmma_kernel<COLUMNS, false, false>), dim3(cases), 128, BYTES, stream, in, out);
}

}  // namespace
}  // namespace smelt

using namespace smelt;

extern "C" {

const char* conformance_message(int code) { return code == -1 ? "no such primitive" : message(code); }

int conformance_capability(int* value) { return capability(value); }

// In the order of conformance.py.
int conformance_warp(int which, const uint32_t* in, uint32_t* out, int cases, void* stream) {
  const dim3 grid(cases);
  switch (which) {
    case 0:
      return SMELT_LAUNCH((load_matrix_kernel<false>), grid, 32, 512, stream, in, out);
    case 1:
      return SMELT_LAUNCH((load_matrix_kernel<true>), grid, 32, 512, stream, in, out);
    case 2:
      return SMELT_LAUNCH(mma_kernel, grid, 32, 0, stream, in, out);
    case 3:
      return SMELT_LAUNCH(copy_kernel, grid, 32, 272, stream, in, out);
    case 4:
      return SMELT_LAUNCH(pack_kernel, grid, 32, 0, stream, in, out);
    case 5:
      return SMELT_LAUNCH(exponential_kernel, grid, 32, 0, stream, in, out);
    case 6:
      return SMELT_LAUNCH(shuffle_kernel, grid, 32, 0, stream, in, out);
    case 7:
      return SMELT_LAUNCH(move_kernel, grid, 32, 128, stream, in, out);
    default:
      return -1;
  }
}

int conformance_wgmma(int columns, int a_mn, int b_mn, const uint32_t* in, uint32_t* out, int cases, void* stream) {
  switch (columns) {
    case 64:
      return launch_wgmma<64>(a_mn, b_mn, in, out, cases, stream);
    case 96:
      return launch_wgmma<96>(a_mn, b_mn, in, out, cases, stream);
    case 128:
      return launch_wgmma<128>(a_mn, b_mn, in, out, cases, stream);
    case 176:
      return launch_wgmma<176>(a_mn, b_mn, in, out, cases, stream);
    case 192:
      return launch_wgmma<192>(a_mn, b_mn, in, out, cases, stream);
    case 256:
      return launch_wgmma<256>(a_mn, b_mn, in, out, cases, stream);
    default:
      return -1;
  }
}
}
