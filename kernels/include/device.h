// Which machine instructions do the kernels use? Every one has a name here, and nothing else in kernels/ is CUDA:
//
//   nvcc                    inline PTX, sm_80 and up
//   g++ -DSMELT_EMULATED    kernels/emulator: every CUDA thread is a fiber on the CPU, every misuse a finding
//
// A kernel reads threadIdx, blockIdx, blockDim and gridDim, touches shared memory and vectors of global memory through
// the functions below, and is started by SMELT_LAUNCH. `bf16 pair` is two bf16 in 32 bits, the lower index in the low
// half.
#pragma once

#if defined(SMELT_EMULATED)
#include "../emulator/emulator.h"
#else

#include <cuda_runtime.h>
#include <stdint.h>

#define SMELT_KERNEL(threads, blocks_per_sm) __global__ __launch_bounds__(threads, blocks_per_sm)
#define SMELT_DEVICE __device__ __forceinline__
#define SMELT_UNROLL _Pragma("unroll")
#define SMELT_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
// A template's name goes in parentheses: SMELT_LAUNCH((up<64, 64>), grid, block, bytes, stream, arguments...).
#define SMELT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  smelt::launch(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

namespace smelt {

// ---- host: 0 or a code, and what the code means ----

inline const char* message(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// 90 for compute capability 9.0
inline int capability(int* value) {
  int device = 0, major = 0, minor = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (code == cudaSuccess) *value = 10 * major + minor;
  return code;
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
           Arguments... arguments) {
  if (shared_bytes > 48 * 1024) {  // more has to be asked for, once per kernel and device; asking again costs nothing
    cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    if (code != cudaSuccess) return code;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// ---- barrier, asynchronous copies ----

SMELT_DEVICE void barrier() { __syncthreads(); }

SMELT_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes of shared memory: the first `bytes` (0..16) come from global memory, the rest is zero. Nothing past `bytes`
// is read; both addresses are multiples of 16.
SMELT_DEVICE void copy_async16(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global), "r"(bytes)
               : "memory");
}
SMELT_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Until at most N of this thread's committed groups are under way; others see the data after a barrier.
template <int N>
SMELT_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// ---- the warp's matrix instructions ----

// Four 8 x 8 matrices of bf16: lane 8 q + i names row i of matrix q; r[q] of lane l is columns 2 (l % 4) and + 1 of row
// l / 4.
SMELT_DEVICE void load_matrix4(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}
// The same of the transposed matrices: r[q] of lane l is rows 2 (l % 4) and + 1 of column l / 4.
SMELT_DEVICE void load_matrix4_transposed(uint32_t (&r)[4], const void* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared))
               : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8]. With g = lane / 4, t = 2 (lane % 4): c[0], c[1] are row g, columns t and t + 1,
// c[2], c[3] row g + 8; a[0] is row g, columns t, t + 1; a[1] row g + 8; a[2], a[3] the same 8 columns on; b0 is rows
// t, t + 1 of column g, b1 8 rows on.
SMELT_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- numbers ----

// Two floats to a bf16 pair, each rounded to nearest even; every NaN becomes 0x7fff.
SMELT_DEVICE uint32_t pack(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
SMELT_DEVICE float low(uint32_t pair) { return __uint_as_float(pair << 16); }
SMELT_DEVICE float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
SMELT_DEVICE uint32_t bits(float value) { return __float_as_uint(value); }
SMELT_DEVICE float from_bits(uint32_t bits) { return __uint_as_float(bits); }
SMELT_DEVICE float exponential(float x) { return __expf(x); }

SMELT_DEVICE float shuffle_xor(float value, int lane_mask) { return __shfl_xor_sync(0xffffffffu, value, lane_mask); }
SMELT_DEVICE uint32_t shuffle_xor(uint32_t value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
// The value of the lane `delta` below; the lowest `delta` lanes keep their own.
SMELT_DEVICE int shuffle_up(int value, int delta) { return __shfl_up_sync(0xffffffffu, value, delta); }

// ---- plain accesses: shared words, and vectors of global memory ----

SMELT_DEVICE void store_shared(int* shared, int value) { *shared = value; }
SMELT_DEVICE int load_shared(const int* shared) { return *shared; }

SMELT_DEVICE uint32_t load4(const void* global) { return *static_cast<const uint32_t*>(global); }
SMELT_DEVICE uint4 load16(const void* global) { return *static_cast<const uint4*>(global); }
SMELT_DEVICE void store4(void* global, uint32_t value) { *static_cast<uint32_t*>(global) = value; }
SMELT_DEVICE void store8(void* global, uint32_t x, uint32_t y) { *static_cast<uint2*>(global) = make_uint2(x, y); }
SMELT_DEVICE void store8(void* global, float x, float y) { *static_cast<float2*>(global) = make_float2(x, y); }
SMELT_DEVICE void store16(void* global, uint4 value) { *static_cast<uint4*>(global) = value; }

}  // namespace smelt
#endif
