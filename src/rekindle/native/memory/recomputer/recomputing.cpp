#include "recomputing.h"

#include <algorithm>

#include "../../ops/call_again.h"
#include "../../torch/global_flags.h"
#include "../../torch/raised.h"
#include "../../torch/storage_ptr.h"

namespace rekindle {

namespace {

bool is_of_torch(const Recipe& recipe) {
    return recipe.facts->is_aten;
}

// Return true if the kernel of a recomputation must run with the session mutex held, so that no
// operator of another thread runs meanwhile: the kernel may draw from the default generator of a
// device (NOTE [Private generators]), or flags of the whole process have the values of the first
// run. This cannot deadlock, because PyTorch's own kernels wait for no other thread.
bool must_be_alone(const Recipe& recipe) {
    const auto is_on_device = [](const auto& each) { return each->is_on_device(); };
    const Signature& signature = *recipe.signature;
    return is_of_torch(recipe) && (std::ranges::any_of(recipe.random(), is_on_device) ||
                                   flags_of_process_differ(flags_of(signature), signature.key[2]));
}

}  // namespace

Recomputing::Recomputing(
    Frees& frees,
    InProgress& in_progress,
    Recipe& recipe,
    bool in_place,
    std::span<const StoragePtr> operands
)
    : Opening(the_mutex()),
      frees_(frees),
      in_progress_(in_progress),
      recipe_(recipe),
      operands_(operands),
      opens_(!must_be_alone(recipe)),
      reads_anything_(!is_of_torch(recipe)),
      interlude_(frees.engine, recipe, in_place) {
    if (in_place) {
        for (const Overwrite& pair : recipe.overwrites()) {
            StorageRecord& source = record_of(*pair.source->storage);
            lent_.emplace_back(&source, frees.registry.take(source));
        }
    }
    ++in_progress_.started;
    ++in_progress_.operators;
    if (reads_anything_) {
        ++in_progress_.reading_anything;
    }
    if (opens_) {
        open();
    }
}

Recomputing::~Recomputing() {
    if (opens_) {
        close();
    }
    --in_progress_.operators;
    if (reads_anything_) {
        --in_progress_.reading_anything;
    }
    frees_.registry.drain();
    // True if the program has freed an operand of this recomputation. Its result then cannot be
    // used.
    const bool dropped = frees_.registry.any_locked_is_gone();
    if (dropped) {
        without_throwing([&] { frees_.process_pending(); });
    }
    if (visited() || dropped) {
        if (frees_.events.swapper != nullptr) {
            frees_.events.swapper->go_on();
        }
        if (reads_anything_ && in_progress_.reading_anything == 0) {
            in_progress_.held->go_on();
        }
        interlude_.visited();
    } else if (undoes_) {
        interlude_.give_back(recipe_);
        for (const auto& [source, storage_impl] : lent_) {
            source->keeper = storage_impl;
            frees_.registry.bind(*source, storage_impl);
        }
    }
}

// Called by the first other thread that takes the session mutex while the kernel runs without it.
// That thread holds the mutex.
void Recomputing::is_visited() noexcept {
    if (reads_anything_) {
        in_progress_.held->stop_evicting_held();
    }
    if (frees_.events.swapper != nullptr) {
        frees_.events.swapper->pause();
    }
}

}  // namespace rekindle
