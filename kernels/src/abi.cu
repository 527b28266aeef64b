// Which tier answers a call, and may it?
#include "device.h"
#include "grid.h"
#include "tile.h"

using namespace smelt;

int smelt_abi_version(void) { return SMELT_ABI_VERSION; }

const char* smelt_message(int code) {
  switch (code) {
    case SMELT_UNSUPPORTED: return "this library has no kernels of that tier";
    case SMELT_BAD_ARGUMENT:
      return "an argument is out of range: widths and strides are multiples of 8, pointers of 16 bytes, "
             "sizes below 2^31";
    default: return message(code);
  }
}

int smelt_capability(int* value) { return capability(value); }

int smelt_tile_rows(int tier, int64_t S, int E, int, int) { return tile_rows(tier, S, E); }

int smelt_tile_columns(int tier, int stage, int64_t, int, int H, int F) {
  return tile_columns(tier, stage, stage_width(stage, H, F));
}

int smelt_partials(int tier, int64_t, int, int, int F) {
  const int columns = tile_columns(tier, SMELT_DACT, F);
  return columns ? static_cast<int>(tiles(F, columns)) * dact_parts(tier) : 0;
}

static bool width(int64_t size) { return size >= 8 && size % 8 == 0 && size <= INT32_MAX; }

// What all stages over slots share.
template <class Arguments>
static bool fits(const Arguments& a) {
  return a.S >= 0 && a.S <= INT32_MAX && a.E >= 1 && width(a.H) && width(a.F) && width(2 * int64_t{a.F}) &&
         (a.tile_rows == 64 || a.tile_rows == 128);
}

static bool stride(int64_t ld, int64_t columns) { return ld >= columns && ld % 8 == 0; }

template <class... Pointers>
static bool aligned(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

static const bf16* in(const void* rows) { return static_cast<const bf16*>(rows); }
static bf16* out(void* rows) { return static_cast<bf16*>(rows); }

template <class Arguments>
static int on_tier(int tier, int (*portable)(const Arguments&), int (*hopper)(const Arguments&), const Arguments& a) {
  return tier == 80 ? portable(a) : tier == 90 ? hopper(a) : SMELT_UNSUPPORTED;
}

int smelt_up(const void* x, int64_t ldx, const void* w_gate_up, void* pre, void* h, const int32_t* choice,
             const int32_t* offs, const int32_t* tile0, int64_t S, int K, int E, int H, int F, int tier, int tile_rows,
             void* stream) {
  const UpArguments a{in(x), ldx, in(w_gate_up), out(pre), out(h), choice, offs, tile0, S, K, E, H, F, tile_rows,
                      stream};
  if (!fits(a) || K < 1 || !stride(ldx, H) || !aligned(x, w_gate_up, pre, h)) return SMELT_BAD_ARGUMENT;
  return S == 0 ? 0 : on_tier(tier, portable::up, hopper::up, a);
}

int smelt_down(const void* h, const void* w_down, void* out_SH, const int32_t* offs, const int32_t* tile0, int64_t S,
               int E, int H, int F, int tier, int tile_rows, void* stream) {
  const DownArguments a{in(h), in(w_down), out(out_SH), offs, tile0, S, E, H, F, tile_rows, stream};
  if (!fits(a) || !aligned(h, w_down, out_SH)) return SMELT_BAD_ARGUMENT;
  return S == 0 ? 0 : on_tier(tier, portable::down, hopper::down, a);
}

int smelt_dact(const void* grad, int64_t ldg, const void* w_down, const void* pre, const float* weight, void* dpre,
               void* hw, float* partial, const int32_t* choice, const int32_t* offs, const int32_t* tile0, int64_t S,
               int K, int E, int H, int F, int tier, int tile_rows, void* stream) {
  const DactArguments a{in(grad), ldg, in(w_down), in(pre), weight, out(dpre), out(hw), partial, choice, offs, tile0, S,
                        K, E, H, F, tile_rows, stream};
  if (!fits(a) || K < 1 || !stride(ldg, H) || !aligned(grad, w_down, pre, dpre, hw)) return SMELT_BAD_ARGUMENT;
  return S == 0 ? 0 : on_tier(tier, portable::dact, hopper::dact, a);
}

int smelt_dx(const void* dpre, const void* w_gate_up, void* dx, const int32_t* offs, const int32_t* tile0, int64_t S,
             int E, int H, int F, int tier, int tile_rows, void* stream) {
  const DxArguments a{in(dpre), in(w_gate_up), out(dx), offs, tile0, S, E, H, F, tile_rows, stream};
  if (!fits(a) || !aligned(dpre, w_gate_up, dx)) return SMELT_BAD_ARGUMENT;
  return S == 0 ? 0 : on_tier(tier, portable::dx, hopper::dx, a);
}

int smelt_wgrad(const void* left, int64_t ldl, const int32_t* left_choice, const void* right, int64_t ldr,
                const int32_t* right_choice, int K, void* dw, int how, const int32_t* offs, int64_t S, int E, int rows,
                int columns, int tier, void* stream) {
  const WgradArguments a{in(left), ldl, left_choice, in(right), ldr, right_choice, K, dw, how, offs, S, E, rows,
                         columns, stream};
  const bool gathers = left_choice || right_choice;
  if (S < 0 || S > INT32_MAX || E < 1 || (gathers && K < 1) || how < SMELT_BF16 || how > SMELT_FP32_ADD ||
      !width(rows) || !width(columns) || !stride(ldl, rows) || !stride(ldr, columns) || !aligned(left, right, dw))
    return SMELT_BAD_ARGUMENT;
  return on_tier(tier, portable::wgrad, hopper::wgrad, a);
}
