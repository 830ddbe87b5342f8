#include "recomputing.h"

#include <algorithm>

#include "../torch/global_flags.h"
#include "../torch/raised.h"
#include "../torch/storage_ptr.h"
#include "evict_held_last.h"
#include "held_eviction.h"
#include "swapper.h"

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
    Driver& driver, const Recipe& recipe, bool in_place, std::span<const StoragePtr> operands
)
    : Opening(the_mutex()),
      driver_(driver),
      recipe_(recipe),
      operands_(operands),
      opens_(!must_be_alone(recipe)),
      reads_anything_(!is_of_torch(recipe)),
      interlude_(driver.engine, recipe, in_place) {
    if (in_place) {
        for (const Overwrite& pair : recipe.overwrites()) {
            StorageRecord& source = record_of(*pair.source->storage);
            lent_.emplace_back(&source, driver.registry.take(source));
        }
    }
    ++driver_.in_progress.started;
    ++driver_.in_progress.operators;
    if (reads_anything_) {
        ++driver_.in_progress.reading_anything;
    }
    if (opens_) {
        open();
    }
}

Recomputing::~Recomputing() {
    if (opens_) {
        close();
    }
    --driver_.in_progress.operators;
    if (reads_anything_) {
        --driver_.in_progress.reading_anything;
    }
    driver_.registry.drain();
    // True if the program has freed an operand of this recomputation. Its result then cannot be
    // used.
    const bool dropped = driver_.registry.any_locked_is_gone();
    if (dropped) {
        without_throwing([&] { driver_.frees.process_pending(); });
    }
    if (visited() || dropped) {
        if (driver_.events.swapper != nullptr) {
            driver_.events.swapper->go_on();
        }
        if (reads_anything_ && driver_.in_progress.reading_anything == 0) {
            for (EvictHeldLast* each : driver_.resorts) {
                each->go_on();
            }
        }
        interlude_.visited();
    } else if (undoes_) {
        interlude_.give_back(recipe_);
        for (const auto& [source, storage_impl] : lent_) {
            source->keeper = storage_impl;
            driver_.registry.bind(*source, storage_impl);
        }
    }
}

// Called by the first other thread that takes the session mutex while the kernel runs without it.
// That thread holds the mutex.
void Recomputing::is_visited() noexcept {
    if (reads_anything_) {
        driver_.stop_evicting_held();
    }
    if (driver_.events.swapper != nullptr) {
        driver_.events.swapper->pause();
    }
}

}  // namespace rekindle
