// Programs in which several threads use shared parts of the native core at once, without Python:
// the queue of freed storages, the counting allocator, and the lock. The argument chooses the
// program: `threads` uses all these parts, for ThreadSanitizer. `locks` uses the lock. `readers`
// reads and evicts storages. `arena` allocates and frees in the arena. `forks` forks while other
// threads use these parts.
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "allocator/arena.h"
#include "allocator/counting_allocator.h"
#include "base/mutex.h"
#include "base/without_gil.h"
#include "memory/held/readers.h"
#include "torch/free_queue.h"

namespace rekindle {

void process_pending_late() noexcept {}  // This program has no driver (object of a budget).

WithoutGil::WithoutGil() = default;  // Without Python there is no GIL.
WithoutGil::~WithoutGil() = default;

}  // namespace rekindle

namespace {

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;
using AddressMap = std::vector<const void*>;
using Records = std::vector<rekindle::StorageRecord*>;

constexpr int STORAGES = 4000;
constexpr int FORKS = 200;
constexpr unsigned PATIENCE_S = 5;

StoragePtr make(std::size_t nbytes) {
    StoragePtr made = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), nbytes, c10::GetCPUAllocator(), true
    );
    static_cast<char*>(made->mutable_data())[0] = 1;
    return made;
}

void allocate_and_free(std::atomic<long>& watched) {
    for (std::size_t i = 0; i < STORAGES; ++i) {
        StoragePtr storage_impl = make(64 + i % 512);
        watched += rekindle::hook_deleter(*storage_impl) ? 1 : 0;
        if (i % 100 == 0) {  // free this storage in another thread
            std::thread([given = std::move(storage_impl)]() mutable { given.reset(); }).join();
        }
    }
}

// Return the number of freed storages that were not reported.
long threads() {
    std::atomic<bool> over{false};
    std::atomic<long> watched{0};
    rekindle::FreeQueue all;
    AddressMap heard;
    std::thread contexts([&] {
        while (!over) {
            rekindle::FreeQueue one;
            one.late.store(true, std::memory_order_relaxed);
            AddressMap addresses;
            Records records;
            one.take(addresses, records);
        }
    });
    std::thread counts([&] {
        while (!over) {
            rekindle::watch_allocations(rekindle::UNLIMITED, std::nullopt);
            std::this_thread::yield();
            static_cast<void>(rekindle::watched_allocations());
        }
    });
    std::thread hears([&] {
        Records records;
        while (!over) {
            if (all.any()) {
                all.take(heard, records);
            }
        }
    });
    std::vector<std::thread> allocate;
    for (int i = 0; i < 4; ++i) {
        allocate.emplace_back([&] { allocate_and_free(watched); });
    }
    for (std::thread& each : allocate) {
        each.join();
    }
    over = true;
    contexts.join();
    counts.join();
    hears.join();
    Records records;
    all.take(heard, records);
    return watched - static_cast<long>(heard.size());
}

// Return the number of turns that were lost because two threads had the lock at once.
long locks() {
    constexpr long TURNS = 50'000;
    rekindle::Mutex& mutex = rekindle::the_mutex();
    long taken = 0;
    std::vector<std::thread> take;
    for (int i = 0; i < 4; ++i) {
        take.emplace_back([&] {
            for (long turn = 0; turn < TURNS; ++turn) {
                if (turn % 3 != 0 || !mutex.try_lock()) {
                    mutex.lock();
                }
                const std::lock_guard had(mutex, std::adopt_lock);
                ++taken;
            }
        });
    }
    for (std::thread& each : take) {
        each.join();
    }
    return static_cast<long>(take.size()) * TURNS - taken;
}

class Reads final : public rekindle::Reader {
public:
    explicit Reads(const StoragePtr& storage_impl) : home_(storage_impl.get()) {}

    void note_read(rekindle::StorageList& read) const override { read.push_back(home_); }

private:
    const c10::StorageImpl* home_;
};

// Return how often a thread evicted a storage that another thread was reading. The reading thread
// has announced the read, and releases the lock while it reads.
long readers() {
    constexpr long TURNS = 20'000;
    constexpr std::size_t PIECES = 4;
    std::vector<StoragePtr> storages;
    std::array<bool, PIECES> evicted{};
    for (std::size_t i = 0; i < PIECES; ++i) {
        storages.push_back(make(64));
    }
    rekindle::Readers all;
    std::atomic<long> wrong{0};
    std::vector<std::thread> threads;
    for (std::size_t first = 0; first < 2; ++first) {
        threads.emplace_back([&, first] {
            for (long turn = 0; turn < TURNS; ++turn) {
                const std::size_t piece = (first + static_cast<std::size_t>(turn)) % PIECES;
                rekindle::Locked lock;
                Reads reads(storages[piece]);
                all.add(reads);
                if (evicted[piece]) {  // if not, another thread may read the flag now: do not write
                    evicted[piece] = false;
                }
                {
                    const rekindle::Unlocked others(lock);
                    wrong += evicted[piece] ? 1 : 0;
                }
                all.remove(reads);
            }
        });
        threads.emplace_back([&] {
            for (long turn = 0; turn < TURNS; ++turn) {
                const rekindle::Locked lock;
                rekindle::StorageList read;
                all.each([&](const rekindle::Reader& reader) { reader.note_read(read); });
                for (std::size_t i = 0; i < PIECES; ++i) {
                    if (std::ranges::find(read, storages[i].get()) == read.end()) {
                        evicted[i] = true;
                    }
                }
            }
        });
    }
    for (std::thread& each : threads) {
        each.join();
    }
    return wrong;
}

// A block from the allocator. The thread that allocated it writes its mark to both ends.
class Piece final {
public:
    Piece(std::size_t nbytes, std::uint32_t mark)
        : data_(c10::GetCPUAllocator()->allocate(nbytes)),
          last_(nbytes - sizeof mark),
          mark_(mark) {
        std::memcpy(at(0), &mark, sizeof mark);
        std::memcpy(at(last_), &mark, sizeof mark);
    }

    // True if no other thread wrote to this block, and its address is aligned for PyTorch.
    bool is_sound() const {
        return std::memcmp(at(0), &mark_, sizeof mark_) == 0 &&
               std::memcmp(at(last_), &mark_, sizeof mark_) == 0 &&
               reinterpret_cast<std::uintptr_t>(data_.get()) % 64 == 0;
    }

private:
    char* at(std::size_t offset) const { return static_cast<char*>(data_.get()) + offset; }

    c10::DataPtr data_;
    std::size_t last_;
    std::uint32_t mark_;
};

// Return the number of blocks that were not sound, plus one if memory is left after all was freed.
long arena() {
    constexpr std::uint32_t TURNS = 20'000;
    constexpr std::size_t KEPT = 60;
    constexpr rekindle::Bytes BUDGET = rekindle::Bytes{8} << 20;
    rekindle::Arena& arena = rekindle::the_arena();
    arena.open(BUDGET);
    std::atomic<long> wrong{0};
    const auto take_and_give = [&](std::uint32_t thread) {
        std::vector<Piece> kept;
        std::uint32_t random = thread + 1;
        for (std::uint32_t turn = 0; turn < TURNS; ++turn) {
            random = random * 1664525U + 1013904223U;
            const std::size_t nbytes = std::size_t{8} << (random >> 28);  // up to 256 KiB
            const std::uint32_t mark = thread * TURNS + turn;
            kept.emplace_back(nbytes + (random >> 8) % nbytes, mark);
            if (kept.size() > KEPT) {
                std::swap(kept[(random >> 16) % kept.size()], kept.back());
                wrong += kept.back().is_sound() ? 0 : 1;
                kept.pop_back();
            }
            if (thread == 0 && turn % 1000 == 0) {
                arena.note_counted(turn);
                arena.limit(turn % 2000 == 0 ? BUDGET / 4 : BUDGET);
            }
        }
        std::thread([&wrong, given = std::move(kept)]() mutable {  // freed in another thread
            for (const Piece& each : given) {
                wrong += each.is_sound() ? 0 : 1;
            }
            given.clear();
        })
            .join();
    };
    std::vector<std::thread> threads;
    for (std::uint32_t i = 0; i < 4; ++i) {
        threads.emplace_back(take_and_give, i);
    }
    for (std::thread& each : threads) {
        each.join();
    }
    Piece outlives(std::size_t{100} << 10, TURNS);
    arena.close(true);
    wrong += outlives.is_sound() && arena.live() >= rekindle::Bytes{100} << 10 ? 0 : 1;
    {
        const Piece freed = std::move(outlives);
    }
    return wrong + (arena.live() == 0 && arena.cached() == 0 ? 0 : 1);
}

// Lock and unlock each leaf lock (a lock under which no other lock is taken).
void take_each_leaf() {
    for (std::size_t i = 0; i < rekindle::LEAVES; ++i) {
        const std::scoped_lock guard(rekindle::leaf(static_cast<rekindle::Leaf>(i)));
    }
}

// Return the number of forked children that failed or hung.
long forks() {
    std::atomic<bool> over{false};
    rekindle::FreeQueue all;
    rekindle::watch_allocations(rekindle::UNLIMITED, std::nullopt);
    const auto work = [] {
        rekindle::hook_deleter(*make(64));
        take_each_leaf();
    };
    std::vector<std::thread> others;
    for (int i = 0; i < 2; ++i) {
        others.emplace_back([&] {
            while (!over) {
                work();
            }
        });
    }
    long failed = 0;
    for (int i = 0; i < FORKS && failed == 0; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(PATIENCE_S);
            work();
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        failed += status == 0 ? 0 : 1;
        AddressMap addresses;
        Records records;
        all.take(addresses, records);
    }
    over = true;
    for (std::thread& each : others) {
        each.join();
    }
    return failed;
}

}  // namespace

int main(int count, char** arguments) {
    rekindle::count_allocations();
    if (count != 2 || !rekindle::allocations_are_counted()) {
        return 2;
    }
    const std::string_view what = arguments[1];
    const long wrong = what == "forks"     ? forks()
                       : what == "locks"   ? locks()
                       : what == "readers" ? readers()
                       : what == "arena"   ? arena()
                                           : threads();
    std::printf("%s: %ld wrong\n", arguments[1], wrong);
    return wrong == 0 ? 0 : 1;
}
