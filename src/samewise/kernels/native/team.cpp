// The threads behind team.h: workers that wait for a region, and need not come.
//
// A region is over when the caller has gone through it and no worker is inside. A worker that the system has not
// run by then is not waited for, so a machine that is shared with other processes costs this one its share of the
// cores and no more. Workers spin for some microseconds after a region, then sleep.

#include "team.h"

#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

#if defined(__linux__)

constexpr int IDLE_SPINS = 5000;  // reads of a counter between two regions before a worker sleeps

class Pool {
  public:
    const pid_t process = getpid();  // a forked child has no threads but its own

    // False if another region is going on: the caller then works by itself.
    bool run(int64_t threads, samewise::RegionWork work, void* data) {
        std::unique_lock<std::mutex> only(one_region, std::try_to_lock);
        if (!only.owns_lock()) return false;
        grow(threads - 1);
        region = {threads, work, data};
        gate.store(OPEN);
        opened.fetch_add(1);
        if (asleep.load() > 0) samewise::wake_all(opened);
        work(data, 0);
        gate.fetch_and(~OPEN);
        for (int i = 0; gate.load() != 0; i++) {
            pause_core();
            if (i > SPINS) std::this_thread::yield();
        }
        return true;
    }

  private:
    static constexpr int32_t OPEN = 1 << 30;  // of `gate`; the rest of it counts workers inside
    struct Region { int64_t threads; samewise::RegionWork work; void* data; };

    std::mutex one_region;
    int64_t workers = 0;
    Region region{};
    alignas(LINE) std::atomic<int32_t> gate{0};
    alignas(LINE) std::atomic<int32_t> opened{0};  // how many regions were
    alignas(LINE) std::atomic<int32_t> asleep{0};

    void grow(int64_t count) {
        if (workers >= count) return;
        sigset_t all, before;  // signals are for the program's own threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; workers < count; workers++)
                std::thread([this, worker = workers + 1, seen = opened.load()] { serve(worker, seen); }).detach();
        } catch (const std::system_error&) {  // fewer workers, then
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void serve(int64_t worker, int32_t seen) {
        for (;;) {
            for (int i = 0; i < IDLE_SPINS && opened.load(std::memory_order_relaxed) == seen; i++) pause_core();
            if (opened.load() == seen) {
                asleep.fetch_add(1);
                samewise::sleep_while(opened, seen);
                asleep.fetch_sub(1);
            }
            seen = opened.load();
            if (!enter()) continue;
            if (worker < region.threads) region.work(region.data, worker);
            gate.fetch_sub(1);
        }
    }

    bool enter() {
        int32_t now = gate.load();
        while (now & OPEN)
            if (gate.compare_exchange_weak(now, now + 1)) return true;
        return false;
    }
};

Pool& the_pool() {
    static std::atomic<Pool*> pool{nullptr};
    Pool* now = pool.load();
    if (now == nullptr || now->process != getpid()) {
        Pool* made = new Pool;  // never deleted: its threads use it until the process ends
        if (pool.compare_exchange_strong(now, made)) return *made;
        delete made;
    }
    return *now;
}

#endif

}  // namespace

void samewise::run_region(void* parallel, int64_t threads, RegionWork work, void* data) {
    if (parallel == nullptr || threads <= 1) return work(data, 0);
#if defined(__linux__)
    if (!the_pool().run(threads, work, data)) work(data, 0);
#else
    struct Shared {
        RegionWork work;
        void* data;
        std::atomic<int64_t> workers{0};
    } shared{work, data};
    auto enter = [](void* p) {
        Shared& s = *static_cast<Shared*>(p);
        s.work(s.data, s.workers.fetch_add(1));
    };
    reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(parallel)(enter, &shared, unsigned(threads), 0);
#endif
}
