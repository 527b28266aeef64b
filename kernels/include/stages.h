// How does a call of the C interface reach a tier? As one struct per stage, with the names of abi.h.
#pragma once
#include <stdint.h>

#include "abi.h"

namespace smelt {

using bf16 = uint16_t;  // the bits

struct UpArguments {
  const bf16* x;
  int64_t ldx;
  const bf16* w_gate_up;
  bf16 *pre, *h;
  const int *choice, *offs, *tile0;
  int64_t S;
  int K, E, H, F, tile_rows;
  void* stream;
};

struct DownArguments {
  const bf16 *h, *w_down;
  bf16* out;
  const int *offs, *tile0;
  int64_t S;
  int E, H, F, tile_rows;
  void* stream;
};

struct DactArguments {
  const bf16* grad;
  int64_t ldg;
  const bf16 *w_down, *pre;
  const float* weight;
  bf16 *dpre, *hw;
  float* partial;
  const int *choice, *offs, *tile0;
  int64_t S;
  int K, E, H, F, tile_rows;
  void* stream;
};

struct DxArguments {
  const bf16 *dpre, *w_gate_up;
  bf16* dx;
  const int *offs, *tile0;
  int64_t S;
  int E, H, F, tile_rows;
  void* stream;
};

struct WgradArguments {
  const bf16* left;
  int64_t ldl;
  const int* left_choice;
  const bf16* right;
  int64_t ldr;
  const int* right_choice;
  int K;
  void* dw;
  int how;
  const int* offs;
  int64_t S;
  int E, rows, columns;
  void* stream;
};

namespace portable {
int up(const UpArguments& a);
int down(const DownArguments& a);
int dact(const DactArguments& a);
int dx(const DxArguments& a);
int wgrad(const WgradArguments& a);
}  // namespace portable

namespace hopper {
int up(const UpArguments& a);
int down(const DownArguments& a);
int dact(const DactArguments& a);
int dx(const DxArguments& a);
int wgrad(const WgradArguments& a);
}  // namespace hopper

}  // namespace smelt
