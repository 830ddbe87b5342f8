#include "global_flags.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#include <array>
#include <span>
#include <utility>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

namespace rekindle {

namespace {

// The settings that kernels read, those of matrix products first. A setting may say "inherit from
// the more general setting"; torch resolves that when the setting is read.
constexpr std::array PRECISE{
    std::pair(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL),
    std::pair(at::Float32Backend::MKLDNN, at::Float32Op::CONV),
    std::pair(at::Float32Backend::MKLDNN, at::Float32Op::RNN),
};
constexpr std::array PRECISE_ON_DEVICE{
    std::pair(at::Float32Backend::CUDA, at::Float32Op::MATMUL),
    std::pair(at::Float32Backend::CUDA, at::Float32Op::CONV),
    std::pair(at::Float32Backend::CUDA, at::Float32Op::RNN),
};
// bit position, in the packed word, of the precision set by torch's older functions
constexpr int LEGACY = 48;
// Bits of the packed word. The first is always set, so that the word is never 0. The second is set
// if the word has only the first of `PRECISE`.
constexpr std::int64_t PRESENT = std::int64_t{1} << 62;
constexpr std::int64_t ONLY_MATRIX = std::int64_t{1} << 61;

constexpr std::span<const std::pair<at::Float32Backend, at::Float32Op>> precise(bool only_matrix) {
    return std::span(PRECISE).first(only_matrix ? 1 : PRECISE.size());
}

bool has_device() {
    static const bool has = at::hasCUDA();
    return has;
}

bool flushes_denormal() noexcept {
// Read the flag for denormal numbers from the processor's control register where possible: the
// arithmetic below takes as long as reading all other settings.
#ifdef __SSE__
    constexpr unsigned results = 0x8000;
    constexpr unsigned operands = 0x0040;
    return (_mm_getcsr() & (results | operands)) != 0;
#else
    const volatile double least = 5e-324;
    const volatile double one = 1.0;
    return least * one == 0.0;
#endif
}

void set_switches(std::int64_t word) {
    at::Context& context = at::globalContext();
    const auto bit = [&](int position) { return (word >> position & 1) != 0; };
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(word & 0xFF)));
    context.setUserEnabledMkldnn(bit(8));
    context.setDeterministicAlgorithms(bit(9), bit(10));
    context.setDeterministicMkldnn(bit(11));
    context.setUserEnabledNNPACK(bit(12));
    context.setAllowFP16ReductionCPU(bit(13));
    at::Context::setFlushDenormal(bit(14));
    at::set_num_threads(static_cast<int>(word >> 16 & 0xFFFF));
}

std::int64_t switches_of_device() {
    at::Context& context = at::globalContext();
    std::int64_t word = static_cast<std::int64_t>(context.userEnabledCuDNN()) << 32;
    word |= static_cast<std::int64_t>(context.deterministicCuDNN()) << 33;
    word |= static_cast<std::int64_t>(context.benchmarkCuDNN()) << 34;
    word |= static_cast<std::int64_t>(context.allowFP16AccumulationCuBLAS()) << 35;
    word |= static_cast<std::int64_t>(context.allowFP16ReductionCuBLAS()) << 36;
    word |= static_cast<std::int64_t>(context.allowBF16ReductionCuBLAS()) << 38;
    word |= static_cast<std::int64_t>(context.blasPreferredBackend()) << 40;
    word |= static_cast<std::int64_t>(context.linalgPreferredBackend()) << 44;
    return word;
}

void set_switches_of_device(std::int64_t word) {
    at::Context& context = at::globalContext();
    const std::int64_t differ = switches_of_device() ^ word;
    const auto part = [&](int position, int mask) { return word >> position & mask; };
    context.setUserEnabledCuDNN(part(32, 1) != 0);
    context.setDeterministicCuDNN(part(33, 1) != 0);
    context.setBenchmarkCuDNN(part(34, 1) != 0);
    context.setAllowFP16AccumulationCuBLAS(part(35, 1) != 0);
    context.setAllowFP16ReductionCuBLAS(part(36, 3) == 0, part(36, 3) < 2);
    context.setAllowBF16ReductionCuBLAS(part(38, 3) == 0, part(38, 3) < 2);
    if ((differ >> 40 & 15) != 0) {
        context.setBlasPreferredBackend(static_cast<at::BlasBackend>(part(40, 15)));
    }
    if ((differ >> 44 & 15) != 0) {
        context.setLinalgPreferredBackend(static_cast<at::LinalgBackend>(part(44, 15)));
    }
}

// Return 1 + the precision that torch's older functions set. Return 0 if the program set precisions
// by the newer functions, in which case the older getter throws. The getter is called only if
// another precision changed.
std::int64_t legacy_precision(std::int64_t word) {
    static std::int64_t last_word = 0;
    static std::int64_t last = 0;
    if (word != last_word) {
        last_word = word;
        try {
            last = static_cast<std::int64_t>(at::globalContext().float32MatmulPrecision()) + 1;
        } catch (const c10::Error&) {
            last = 0;
        }
    }
    return last;
}

template <class Kinds>
void read_precisions(std::int64_t& word, int& shift, const Kinds& kinds) {
    for (const auto& [backend, op] : kinds) {
        const auto found = at::globalContext().float32Precision(backend, op);
        word |= static_cast<std::int64_t>(found) << shift;
        shift += 3;
    }
}

template <class Kinds>
void set_precisions(std::int64_t& word, const Kinds& kinds) {
    at::Context& context = at::globalContext();
    for (const auto& [backend, op] : kinds) {
        const auto then = static_cast<at::Float32Precision>(word & 7);
        if (context.float32Precision(backend, op) != then) {
            context.setFloat32Precision(backend, op, then);
        }
        word >>= 3;
    }
}

void set_precision(std::int64_t word) {
    constexpr std::array<const char*, 3> names{"highest", "high", "medium"};
    if (const auto legacy = static_cast<std::size_t>(word >> LEGACY & 3); legacy != 0) {
        at::globalContext().setFloat32MatmulPrecision(names.at(legacy - 1));
    }
    set_precisions(word, precise((word & ONLY_MATRIX) != 0));
    if (has_device()) {
        set_precisions(word, PRECISE_ON_DEVICE);
    }
}

void set_all_switches(std::int64_t word) {
    set_switches(word);
    if (has_device()) {
        set_switches_of_device(word);
    }
}

}  // namespace

bool kernels_are_timed() {
    const at::Context& context = at::globalContext();
    return context.benchmarkCuDNN() && !context.deterministicCuDNN() &&
           !context.deterministicAlgorithms();
}

std::int64_t global_flags() {
    at::Context const& context = at::globalContext();
    std::int64_t word = static_cast<std::int64_t>(c10::get_default_dtype_as_scalartype()) & 0xFF;
    word |= static_cast<std::int64_t>(context.userEnabledMkldnn()) << 8;
    word |= static_cast<std::int64_t>(context.deterministicAlgorithms()) << 9;
    word |= static_cast<std::int64_t>(context.deterministicAlgorithmsWarnOnly()) << 10;
    word |= static_cast<std::int64_t>(context.deterministicMkldnn()) << 11;
    word |= static_cast<std::int64_t>(context.userEnabledNNPACK()) << 12;
    word |= static_cast<std::int64_t>(context.allowFP16ReductionCPU()) << 13;
    word |= static_cast<std::int64_t>(flushes_denormal()) << 14;
    word |= static_cast<std::int64_t>(at::get_num_threads() & 0xFFFF) << 16;
    return has_device() ? word | switches_of_device() : word;
}

std::int64_t precision_flags(bool only_matrix) {
    only_matrix = only_matrix && !has_device();
    std::int64_t word = only_matrix ? PRESENT | ONLY_MATRIX : PRESENT;
    int shift = 0;
    read_precisions(word, shift, precise(only_matrix));
    if (has_device()) {
        read_precisions(word, shift, PRECISE_ON_DEVICE);
        word |= legacy_precision(word) << LEGACY;
    }
    return word;
}

ScopedGlobalFlags::ScopedGlobalFlags(std::int64_t switches_then, std::int64_t precision_then)
    : now_(global_flags()),
      then_(switches_then),
      precision_now_(
          precision_then == 0 ? 0 : precision_flags((precision_then & ONLY_MATRIX) != 0)
      ),
      precision_then_(precision_then) {
    if (now_ != then_) {
        set_all_switches(then_);
    }
    if (precision_now_ != precision_then_) {
        set_precision(precision_then_);
    }
}

ScopedGlobalFlags::~ScopedGlobalFlags() {
    if (now_ != then_) {
        set_all_switches(now_);
    }
    if (precision_now_ != precision_then_) {
        set_precision(precision_now_);
    }
}

}  // namespace rekindle
