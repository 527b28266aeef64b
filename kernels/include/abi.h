// What does the library of expert kernels offer? A plain C interface, the same for the CUDA and the emulated library.
//
// N tokens, K choices each, S = N K slots, E experts, H hidden, F expert width. A choice is n K + k. Slots hold the
// choices sorted by expert, in order of the choice within one; a choice whose id is outside [0, E) is not routed and
// owns no slot, and the slots past offs[E] are spare. Slots s of expert e: offs[e] <= s < offs[e + 1].
//
// Rows and matrices are bfloat16, added up in float32 and rounded to nearest even; offsets, choices and slots are
// int32, routing weights float32. H, F and every row stride are multiples of 8 and every pointer of 16 bytes. N, K, S,
// E, H and 2F are below 2^31 each, their products need not be. Tensors are dense but for the rows of x, grad, left and
// right.
//
//     pre = [W_gate x | W_up x]   h = silu(gate) up   out = W_down h   y = sum over k of weight_k out
//
// Every element of every output is written: spare slots get zeros, weight gradients of experts without slots too.
// Nothing is read outside the tensors, whatever the ids. No atomics: the same input gives the same bits. No call waits
// for the device, so a CUDA graph may capture them all. `stream` is a cudaStream_t.
//
// Results are 0, a positive code of CUDA or of the emulator, or one of the negative codes below; `smelt_message` says
// it.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  SMELT_ABI_VERSION = 1,
  SMELT_UNSUPPORTED = -1,   // this library has no such tier
  SMELT_BAD_ARGUMENT = -2,  // a size, stride or pointer outside what the head of this file allows
};

// The weight gradients: fp32 ones may be added to what is there.
enum { SMELT_BF16 = 0, SMELT_FP32 = 1, SMELT_FP32_ADD = 2 };

// Whose tile is asked for.
enum { SMELT_UP = 0, SMELT_DOWN = 1, SMELT_DACT = 2, SMELT_DX = 3, SMELT_WGRAD_UP = 4, SMELT_WGRAD_DOWN = 5 };

int smelt_abi_version(void);
const char* smelt_message(int code);
// Of the current device: 90 for 9.0.
int smelt_capability(int* value);

// A tier is 80 (mma.sync and cp.async, from sm_80 on) or 90 (wgmma, sm_90a only). 0: there is no such tier or stage.
int smelt_tile_rows(int tier, int64_t S, int E, int H, int F);
int smelt_tile_columns(int tier, int stage, int64_t S, int E, int H, int F);
// How many rows `partial` of smelt_dact has.
int smelt_partials(int tier, int64_t S, int E, int H, int F);

// Bytes of `workspace`.
int64_t smelt_plan_workspace(int64_t S, int E);
// offs [E + 1]; tile0 [E + 1], the first tile of tile_rows slots of each expert; choice [S], -1 where spare;
// slot [N K], -1 where not routed.
int smelt_plan(const int64_t* idx, int64_t N, int K, int E, int tile_rows, int32_t* offs, int32_t* tile0,
               int32_t* choice, int32_t* slot, void* workspace, void* stream);

// pre [S, 2F] and h [S, F] from x [N, H], row stride ldx, and w_gate_up [E, 2F, H]. h is made from the rounded pre.
int smelt_up(const void* x, int64_t ldx, const void* w_gate_up, void* pre, void* h, const int32_t* choice,
             const int32_t* offs, const int32_t* tile0, int64_t S, int K, int E, int H, int F, int tier, int tile_rows,
             void* stream);
// out [S, H] = h W_down^T, w_down [E, H, F].
int smelt_down(const void* h, const void* w_down, void* out, const int32_t* offs, const int32_t* tile0, int64_t S,
               int E, int H, int F, int tier, int tile_rows, void* stream);
// y [N, H] = sum over k of weight [N, K] times the row of out that belongs to it, in order of k; without weight the
// sum.
int smelt_combine(const void* out, const int32_t* slot, const float* weight, void* y, int64_t N, int K, int H,
                  void* stream);

// From grad [N, H] of y: dpre [S, 2F], hw [S, F] = weight h, and partial [smelt_partials, S], whose sum over the first
// index is the gradient of a slot's routing weight.
int smelt_dact(const void* grad, int64_t ldg, const void* w_down, const void* pre, const float* weight, void* dpre,
               void* hw, float* partial, const int32_t* choice, const int32_t* offs, const int32_t* tile0, int64_t S,
               int K, int E, int H, int F, int tier, int tile_rows, void* stream);
// dweight [S], by choice: the partial sums added up in order; 0 where not routed.
int smelt_dweight(const float* partial, int parts, const int32_t* slot, float* dweight, int64_t S, void* stream);
// dx [S, H] = dpre W_gate_up; smelt_combine without weight makes the gradient of x from it.
int smelt_dx(const void* dpre, const void* w_gate_up, void* dx, const int32_t* offs, const int32_t* tile0, int64_t S,
             int E, int H, int F, int tier, int tile_rows, void* stream);
// dw [E, rows, columns], dw[e] = sum over slots s of e of left[s]^T right[s]. Row s of left is row choice[s] / K of the
// tensor where left_choice is given; right alike. dw_gate_up is dpre^T x, dw_down is grad^T hw. `how` is one of the
// three above; SMELT_FP32_ADD leaves an expert without slots as it is.
int smelt_wgrad(const void* left, int64_t ldl, const int32_t* left_choice, const void* right, int64_t ldr,
                const int32_t* right_choice, int K, void* dw, int how, const int32_t* offs, int64_t S, int E, int rows,
                int columns, int tier, void* stream);

#ifdef SMELT_EMULATED
// The order of threads and the moment at which asynchronous copies land.
void smelt_emulator_seed(uint64_t seed);
// CPU threads, each with blocks of its own.
void smelt_emulator_threads(int threads);
// Since the last call: 0 blocks, 1 mma, 2 ldmatrix phases, 3 extra ways of bank conflicts, 4 the most ways of one,
// 5 bytes that cp.async read from global memory, 6 wgmma. Returns how many there are.
int smelt_emulator_counts(int64_t* out, int n);
#endif

#ifdef __cplusplus
}
#endif
