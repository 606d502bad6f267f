// The threads behind team.h: workers that wait for a region, and need not come.
//
// A region is over when the caller has gone through it and no worker is inside. A worker that the system has not
// run by then is not waited for, so a machine that is shared with other processes costs this one its share of the
// cores and no more. Workers spin for some microseconds after a region, then sleep; so does the caller where a
// worker is still inside.
//
// `gate` holds the number of workers inside, OPEN while more may come in, and AWAITED while the caller sleeps until
// the last is out. All that happens to it happens in one order, and no wake-up is lost:
//   - A worker enters by adding 1 to a gate that is OPEN. The caller has closed it before it looks for 0, so the
//     number only falls from there.
//   - The caller sets AWAITED before it sleeps. A last worker that left earlier is then seen as gone; one that
//     leaves later sees AWAITED and wakes the caller, which sleeps only as long as the gate is what it last read.
//   - `opened` and `asleep`, of workers: a worker counts itself asleep before it looks at `opened` for the last time,
//     the caller raises `opened` before it looks at `asleep`. One of the two sees the other.

#include "team.h"

#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <csignal>
#include <unistd.h>
#define SAMEWISE_POSIX
#endif

namespace {

// How long a worker stays awake for the next region. Those of a frame (layers, head, sampler) follow each other
// within this time; between frames there is the host's work, and a worker sleeps.
constexpr std::chrono::microseconds REGION_SPIN{75};

#if defined(SAMEWISE_POSIX)
int64_t current_process() { return getpid(); }

// Signals are for the program's own threads: those made meanwhile take none.
class BlockedSignals {
  public:
    BlockedSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }

  private:
    sigset_t before;
};
#else
int64_t current_process() { return 0; }
struct BlockedSignals { BlockedSignals() {} };
#endif

class Pool {
  public:
    const int64_t process = current_process();  // a forked child has no threads but its own

    // False if another region is going on: the caller then works by itself.
    bool run(int64_t threads, samewise::RegionWork work, void* data) {
        std::unique_lock<std::mutex> only(one_region, std::try_to_lock);
        if (!only.owns_lock()) return false;
        grow(threads - 1);
        region = {threads, work, data};
        gate.store(OPEN);
        opened.fetch_add(1);
        if (asleep.load() > 0) sleepers.wake_all(opened);
        work(data, 0);
        gate.fetch_and(~OPEN);
        wait_for_workers();
        return true;
    }

  private:
    static constexpr int32_t OPEN = 1 << 30, AWAITED = 1 << 29;  // of `gate`
    struct Region { int64_t threads; samewise::RegionWork work; void* data; };

    std::mutex one_region;
    int64_t workers = 0;
    Region region{};
    alignas(LINE) std::atomic<int32_t> gate{0};
    alignas(LINE) std::atomic<int32_t> opened{0};  // how many regions were
    alignas(LINE) std::atomic<int32_t> asleep{0};  // workers that sleep, or are about to
    samewise::WaitQueue sleepers, waiters;         // workers without a region; the caller at the end of one

    void grow(int64_t count) {
        if (workers >= count) return;
        BlockedSignals blocked;
        try {
            for (; workers < count; workers++)
                std::thread([this, worker = workers + 1, seen = opened.load()] { serve(worker, seen); }).detach();
        } catch (const std::system_error&) {  // fewer workers, then
        } catch (const std::bad_alloc&) {
        }
    }

    void serve(int64_t worker, int32_t seen) {
        for (;;) {
            if (!spin_until([&] { return opened.load(std::memory_order_relaxed) != seen; }, REGION_SPIN)) {
                asleep.fetch_add(1);
                while (opened.load() == seen) sleepers.sleep_while(opened, seen);
                asleep.fetch_sub(1);
            }
            seen = opened.load();
            if (!enter()) continue;
            if (worker < region.threads) region.work(region.data, worker);
            leave();
        }
    }

    bool enter() {
        int32_t now = gate.load();
        while (now & OPEN)
            if (gate.compare_exchange_weak(now, now + 1)) return true;
        return false;
    }

    void leave() {
        if (gate.fetch_sub(1) == (AWAITED | 1)) waiters.wake_all(gate);
    }

    void wait_for_workers() {
        if (spin_until([&] { return gate.load() == 0; }, PHASE_SPIN)) return;
        gate.fetch_or(AWAITED);
        for (int32_t now; (now = gate.load()) != AWAITED;) waiters.sleep_while(gate, now);
        gate.store(0);
    }
};

Pool& the_pool() {
    static std::atomic<Pool*> pool{nullptr};
    Pool* now = pool.load();
    if (now == nullptr || now->process != current_process()) {
        Pool* made = new Pool;  // never deleted: its threads use it until the process ends
        if (pool.compare_exchange_strong(now, made)) return *made;
        delete made;
    }
    return *now;
}

}  // namespace

void samewise::run_region(int64_t threads, RegionWork work, void* data) {
    if (threads <= 1 || !the_pool().run(threads, work, data)) work(data, 0);
}
