#include "global_flags.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <dlfcn.h>

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
// Bit position, in the packed word of products, of the precision set by torch's older functions.
constexpr int LEGACY = 48;
// Bits of that word that hold switches. They follow the precisions.
constexpr int SWITCHES = 18;
constexpr std::int64_t ALL_SWITCHES = std::int64_t{0xFFFF} << SWITCHES;
// Bits of that word. The first is always set, so that the word is never 0. The second is set if the
// word has only the first of `PRECISE`.
constexpr std::int64_t PRESENT = std::int64_t{1} << 62;
constexpr std::int64_t ONLY_MATRIX = std::int64_t{1} << 61;

// Bits of the word of switches that hold settings of each thread: the flag for denormal numbers and
// the number of threads.
constexpr int DENORMAL = 11;
constexpr int THREADS = 16;
constexpr std::int64_t MOST_THREADS = 0xFFFF;
constexpr std::int64_t DTYPE = 0xFF;  // bits of the default dtype
constexpr std::int64_t OF_THREAD = std::int64_t{1} << DENORMAL | MOST_THREADS << THREADS;

constexpr std::span<const std::pair<at::Float32Backend, at::Float32Op>> precise(bool only_matrix) {
    return std::span(PRECISE).first(only_matrix ? 1 : PRECISE.size());
}

[[gnu::always_inline]] inline bool has_device() {
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

[[gnu::always_inline]] inline at::Context& the_context() {
    static at::Context& known = at::globalContext();
    return known;
}

// Set the number of threads that share the work of an operator, for operators of this thread.
// Unlike `at::set_num_threads`, do not set the number for threads that the program starts later.
void set_number_of_threads(int n) {
    using OfOpenMp = void (*)(int);
    using OfMkl = int (*)(int);
    static const auto of_openmp =
        reinterpret_cast<OfOpenMp>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    static const auto of_mkl =
        reinterpret_cast<OfMkl>(dlsym(RTLD_DEFAULT, "MKL_Set_Num_Threads_Local"));
    if (of_openmp != nullptr) {
        of_openmp(n);
    }
    if (of_mkl != nullptr) {
        of_mkl(n);
    }
    if (at::get_num_threads() != n) {  // PyTorch uses another library than OpenMP
        at::set_num_threads(n);
    }
}

void set_switches_of_thread(std::int64_t word) {
    at::Context::setFlushDenormal((word >> DENORMAL & 1) != 0);
    set_number_of_threads(threads_in(word));
}

std::int64_t default_dtype() {
    return static_cast<std::int64_t>(c10::get_default_dtype_as_scalartype()) & DTYPE;
}

void set_switches_of_process(std::int64_t word) {
    at::Context& context = the_context();
    const auto bit = [&](int position) { return (word >> position & 1) != 0; };
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(word & DTYPE)));
    context.setUserEnabledMkldnn(bit(8));
    context.setDeterministicAlgorithms(bit(9), bit(10));
}

std::int64_t switches_of_device() {
    const at::Context& context = the_context();
    std::int64_t word = static_cast<std::int64_t>(context.userEnabledCuDNN()) << 32;
    word |= static_cast<std::int64_t>(context.deterministicCuDNN()) << 33;
    return word | static_cast<std::int64_t>(context.benchmarkCuDNN()) << 34;
}

void set_switches_of_device(std::int64_t word) {
    at::Context& context = the_context();
    const auto bit = [&](int position) { return (word >> position & 1) != 0; };
    context.setUserEnabledCuDNN(bit(32));
    context.setDeterministicCuDNN(bit(33));
    context.setBenchmarkCuDNN(bit(34));
}

// Return the switches that only operators read that sum products, at their position in the packed
// word.
std::int64_t switches_of_products() {
    at::Context& context = the_context();
    auto word = static_cast<std::int64_t>(context.deterministicMkldnn());
    word |= static_cast<std::int64_t>(context.userEnabledNNPACK()) << 1;
    word |= static_cast<std::int64_t>(context.allowFP16ReductionCPU()) << 2;
    if (has_device()) {
        word |= static_cast<std::int64_t>(context.allowFP16AccumulationCuBLAS()) << 3;
        word |= static_cast<std::int64_t>(context.allowFP16ReductionCuBLAS()) << 4;
        word |= static_cast<std::int64_t>(context.allowBF16ReductionCuBLAS()) << 6;
        word |= static_cast<std::int64_t>(context.blasPreferredBackend()) << 8;
        word |= static_cast<std::int64_t>(context.linalgPreferredBackend()) << 12;
    }
    return word << SWITCHES;
}

void set_switches_of_products(std::int64_t word) {
    at::Context& context = the_context();
    const std::int64_t differ = switches_of_products() ^ word;
    const auto part = [&](int position, int mask) { return word >> (SWITCHES + position) & mask; };
    const auto differs = [&](int position) { return (differ >> (SWITCHES + position) & 15) != 0; };
    context.setDeterministicMkldnn(part(0, 1) != 0);
    context.setUserEnabledNNPACK(part(1, 1) != 0);
    context.setAllowFP16ReductionCPU(part(2, 1) != 0);
    if (!has_device()) {
        return;
    }
    context.setAllowFP16AccumulationCuBLAS(part(3, 1) != 0);
    context.setAllowFP16ReductionCuBLAS(part(4, 3) == 0, part(4, 3) < 2);
    context.setAllowBF16ReductionCuBLAS(part(6, 3) == 0, part(6, 3) < 2);
    if (differs(8)) {
        context.setBlasPreferredBackend(static_cast<at::BlasBackend>(part(8, 15)));
    }
    if (differs(12)) {
        context.setLinalgPreferredBackend(static_cast<at::LinalgBackend>(part(12, 15)));
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
            last = static_cast<std::int64_t>(the_context().float32MatmulPrecision()) + 1;
        } catch (const c10::Error&) {
            last = 0;
        }
    }
    return last;
}

template <class Kinds>
void read_precisions(std::int64_t& word, int& shift, const Kinds& kinds) {
    for (const auto& [backend, op] : kinds) {
        const auto found = the_context().float32Precision(backend, op);
        word |= static_cast<std::int64_t>(found) << shift;
        shift += 3;
    }
}

template <class Kinds>
void set_precisions(std::int64_t& word, const Kinds& kinds) {
    at::Context& context = the_context();
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
        the_context().setFloat32MatmulPrecision(names.at(legacy - 1));
    }
    set_precisions(word, precise((word & ONLY_MATRIX) != 0));
    if (has_device()) {
        set_precisions(word, PRECISE_ON_DEVICE);
    }
}

// Give the settings of products the values in `word`. `differ`: the bits of `word` that differ from
// the current values.
void set_products(std::int64_t word, std::int64_t differ) {
    if ((differ & ALL_SWITCHES) != 0) {
        set_switches_of_products(word);
    }
    if ((differ & ~ALL_SWITCHES) != 0) {
        set_precision(word);
    }
}

// Return the settings of products now, as far as the word `then` has them.
std::int64_t products_like(std::int64_t then) {
    return then == 0 ? 0 : product_flags((then & ONLY_MATRIX) != 0);
}

}  // namespace

bool kernels_are_timed() {
    const at::Context& context = the_context();
    return context.benchmarkCuDNN() && !context.deterministicCuDNN() &&
           !context.deterministicAlgorithms();
}

std::int64_t global_flags() {
    const at::Context& context = the_context();
    std::int64_t word = default_dtype();
    word |= static_cast<std::int64_t>(context.userEnabledMkldnn()) << 8;
    word |= static_cast<std::int64_t>(context.deterministicAlgorithms()) << 9;
    word |= static_cast<std::int64_t>(context.deterministicAlgorithmsWarnOnly()) << 10;
    word |= static_cast<std::int64_t>(flushes_denormal()) << DENORMAL;
    word |= (at::get_num_threads() & MOST_THREADS) << THREADS;
    return has_device() ? word | switches_of_device() : word;
}

int threads_in(std::int64_t switches) {
    return static_cast<int>(switches >> THREADS & MOST_THREADS);
}

std::int64_t product_flags(bool only_matrix) {
    only_matrix = only_matrix && !has_device();
    std::int64_t word = only_matrix ? PRESENT | ONLY_MATRIX : PRESENT;
    int shift = 0;
    read_precisions(word, shift, precise(only_matrix));
    if (has_device()) {
        read_precisions(word, shift, PRECISE_ON_DEVICE);
        word |= legacy_precision(word) << LEGACY;
    }
    return word | switches_of_products();
}

std::int64_t with_present_dtype(std::int64_t switches) {
    return (switches & ~DTYPE) | default_dtype();
}

bool flags_of_process_differ(std::int64_t switches_then, std::int64_t products_then) {
    return ((global_flags() ^ switches_then) & ~OF_THREAD) != 0 ||
           products_like(products_then) != products_then;
}

ScopedGlobalFlags::ScopedGlobalFlags(
    std::int64_t switches_then, std::int64_t products_then, bool alone
)
    : now_(global_flags()),
      then_(switches_then),
      products_now_(products_like(products_then)),
      products_then_(products_then) {
    const bool differ = ((now_ ^ then_) & ~OF_THREAD) != 0 || products_now_ != products_then_;
    if (alone && differ && Py_IsInitialized() != 0) {
        alone_.emplace();
    }
    set(then_, products_then_);
}

ScopedGlobalFlags::~ScopedGlobalFlags() {
    set(now_, products_now_);
}

// Set the settings in which the first run and the present differ to these values.
void ScopedGlobalFlags::set(std::int64_t switches, std::int64_t products) const {
    const std::int64_t differ = now_ ^ then_;
    if ((differ & OF_THREAD) != 0) {
        set_switches_of_thread(switches);
    }
    if ((differ & ~OF_THREAD) != 0) {
        set_switches_of_process(switches);
        if (has_device()) {
            set_switches_of_device(switches);
        }
    }
    set_products(products, products_now_ ^ products_then_);
}

}  // namespace rekindle
