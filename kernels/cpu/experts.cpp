// The expert MLP on a CPU in float32, forward and backward. Rows of an expert are taken in blocks, a block is one
// thread's work from x to the row that is summed, and what a thread makes does not depend on how many there are.
//
// N tokens, K choices each, S rows sorted by expert, H hidden, F expert width, E experts. Row s is of token token[s]
// and has the routing weight weight[s]; expert e has rows offs[e] to offs[e + 1]; slot[n K + k] is the row of a choice,
// or S and more where it is not routed.
#include "multiply.h"

namespace {

using namespace smelt;

constexpr int BLOCK = 20 * ROWS;    // rows of an expert at a time
constexpr int COLUMNS = 10 * ROWS;  // rows of a weight's gradient at a time

struct Part {
    int64_t expert, begin, end;
};

std::vector<Part> parts_of(const int64_t* offs, int64_t E, int64_t most) {
    std::vector<Part> parts;
    for (int64_t e = 0; e < E; ++e)
        for (int64_t s = offs[e]; s < offs[e + 1]; s += most) parts.push_back({e, s, std::min(s + most, offs[e + 1])});
    return parts;
}

float* scratch(int64_t floats) {
    static thread_local std::vector<float> own;
    if (static_cast<int64_t>(own.size()) < floats) own.resize(floats);
    return own.data();
}

// h = w silu(gate) up
void activate(const float* pre, float weight, float* h, int F) {
    for (int f = 0; f < F; f += LANES) {
        Vector gate = load(pre + f, F - f), up = load(pre + F + f, F - f);
        store(h + f, gate / (1.0f + exponential(-gate)) * up * weight, F - f);
    }
}

// From dh, the gradient of w silu(gate) up: that itself, dpre, and the gradient of w.
float derive(const float* pre, const float* dh, float weight, float* hw, float* dpre, int F) {
    Vector sum = {};
    for (int f = 0; f < F; f += LANES) {
        Vector gate = load(pre + f, F - f), up = load(pre + F + f, F - f), d = load(dh + f, F - f);
        Vector sigma = 1.0f / (1.0f + exponential(-gate)), active = gate * sigma, h = active * up;
        sum += d * h;
        store(hw + f, h * weight, F - f);
        d *= weight;
        store(dpre + F + f, d * active, F - f);
        store(dpre + f, d * up * (sigma + active * (1.0f - sigma)), F - f);
    }
    return total(sum);
}

// y_n = the sum over k, in order, of its rows.
void combine(const float* rows, const int64_t* slot, float* y, int64_t N, int64_t K, int64_t S, int H, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; ++n) {
        const int64_t* of_token = slot + n * K;
        for (int j = 0; j < H; j += LANES) {
            Vector sum = {};
            for (int64_t k = 0; k < K; ++k)
                if (of_token[k] < S) sum += load(rows + of_token[k] * H + j, H - j);
            store(y + n * H + j, sum, H - j);
        }
    }
}

}  // namespace

extern "C" {

int smelt_cpu_abi_version() { return 1; }

int smelt_cpu_lanes() { return LANES; }

// pre_S2F and y_NH; out_SH is room for the rows.
void smelt_cpu_forward(const float* x, int64_t ldx, const float* w_gate_up, const float* w_down, const int64_t* token,
                       const float* weight, const int64_t* offs, const int64_t* slot, float* pre, float* out, float* y,
                       int64_t N, int64_t K, int64_t E, int H, int F, int threads) {
    const auto parts = parts_of(offs, E, BLOCK);
    const int64_t number = static_cast<int64_t>(parts.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < number; ++p) {
        const auto [e, s, end] = parts[p];
        const int rows = static_cast<int>(end - s);
        float* h = scratch(static_cast<int64_t>(BLOCK) * F);
        multiply_rows(rows, 2 * F, H, Rows{x, ldx, token + s}, Rows{w_gate_up + e * 2 * F * H, H}, Right::transposed,
                      pre + s * 2 * F, 2 * F);
        for (int r = 0; r < rows; ++r) activate(pre + (s + r) * 2 * F, weight[s + r], h + int64_t{r} * F, F);
        multiply_rows(rows, H, F, Rows{h, F}, Rows{w_down + e * H * F, F}, Right::transposed, out + s * H, H);
    }
    combine(out, slot, y, N, K, offs[E], H, threads);
}

// hw_SF and dpre_S2F are room; a gradient that is null is not made, dx_SH is the room of dx_NH.
void smelt_cpu_backward(const float* grad, int64_t ldg, const float* x, int64_t ldx, const float* w_gate_up,
                        const float* w_down, const int64_t* token, const float* weight, const int64_t* offs,
                        const int64_t* slot, const float* pre, float* hw, float* dpre, float* dx_rows, float* dx,
                        float* dw_gate_up, float* dw_down, float* dweight, int64_t N, int64_t K, int64_t E, int H,
                        int F, int threads) {
    const auto parts = parts_of(offs, E, BLOCK);
    const int64_t number = static_cast<int64_t>(parts.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t p = 0; p < number; ++p) {
        const auto [e, s, end] = parts[p];
        const int rows = static_cast<int>(end - s);
        float* dh = scratch(static_cast<int64_t>(BLOCK) * F);
        multiply_rows(rows, F, H, Rows{grad, ldg, token + s}, Rows{w_down + e * H * F, F}, Right::as_it_is, dh, F);
        for (int r = 0; r < rows; ++r) {
            const int64_t row = s + r;
            dweight[row] =
                derive(pre + row * 2 * F, dh + int64_t{r} * F, weight[row], hw + row * F, dpre + row * 2 * F, F);
        }
        if (dx)
            multiply_rows(rows, H, 2 * F, Rows{dpre + s * 2 * F, 2 * F}, Rows{w_gate_up + e * 2 * F * H, H},
                          Right::as_it_is, dx_rows + s * H, H);
    }
    const int64_t of_down = dw_down ? (H + COLUMNS - 1) / COLUMNS : 0;
    const int64_t of_up = dw_gate_up ? (2 * F + COLUMNS - 1) / COLUMNS : 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < E * (of_down + of_up); ++i) {
        const int64_t e = i / (of_down + of_up), s = offs[e], at = i % (of_down + of_up);
        const int rows = static_cast<int>(offs[e + 1] - s);
        if (at < of_down) {
            const int first = static_cast<int>(at) * COLUMNS;
            multiply_columns(first, std::min(H - first, COLUMNS), F, rows, Rows{grad, ldg, token + s},
                             Rows{hw + s * F, F}, dw_down + (e * H + first) * F, F);
        } else {
            const int first = static_cast<int>(at - of_down) * COLUMNS;
            multiply_columns(first, std::min(2 * F - first, COLUMNS), H, rows, Rows{dpre + s * 2 * F, 2 * F},
                             Rows{x, ldx, token + s}, dw_gate_up + (e * 2 * F + first) * H, H);
        }
    }
    if (dx) combine(dx_rows, slot, dx, N, K, offs[E], H, threads);
}
}
