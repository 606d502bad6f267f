// Threads that go through a pass of many phases together, in one parallel region.
//
// A phase is a number of tasks, each done once by any thread. It is over when its tasks are done: a thread that
// the system runs late finds the others' work done and goes on, instead of being waited for. Every thread
// goes through the same phases in the same order.

#pragma once

#include "lanes.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace samewise {

using RegionWork = void (*)(void* data, int64_t worker);

// work(data, 0) by the caller, and work(data, i) with 0 < i < threads by as many others as come in time. A null
// `parallel` allows none; where there is no pool of ours it is the OpenMP runtime's GOMP_parallel.
void run_region(void* parallel, int64_t threads, RegionWork work, void* data);

#if defined(__linux__)
static_assert(sizeof(std::atomic<int32_t>) == sizeof(int32_t));
// Until `now` is woken; at once if it is not `seen`.
inline void sleep_while(std::atomic<int32_t>& now, int32_t seen) {
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&now), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
inline void wake_all(std::atomic<int32_t>& now) {
    syscall(SYS_futex, reinterpret_cast<int32_t*>(&now), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}
#else
inline void sleep_while(std::atomic<int32_t>&, int32_t) { std::this_thread::yield(); }
inline void wake_all(std::atomic<int32_t>&) {}
#endif

}  // namespace samewise

namespace {

constexpr int64_t LINE = 64;  // bytes that one core writes at a time
constexpr int SPINS = 2000;   // reads of a counter before a thread sleeps: about 30 microseconds

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// What the threads of a region share: counters of each phase, zero at first.
class Phases {
  public:
    Phases(int64_t count, int64_t threads)
        : threads(threads),
          stride((threads + 1 + LINE / 4 - 1) / (LINE / 4) * (LINE / 4)),
          counters(new std::atomic<int32_t>[count * stride]()) {}

    const int64_t threads;
    std::atomic<int32_t>& done(int64_t phase) { return counters[phase * stride]; }
    std::atomic<int32_t>& next(int64_t phase, int64_t part) { return counters[phase * stride + 1 + part]; }

    void wait(int64_t phase, int32_t count) {
        std::atomic<int32_t>& now = done(phase);
        for (int i = 0; i < SPINS; i++) {
            if (now.load(std::memory_order_acquire) == count) return;
            pause_core();
        }
        asleep.fetch_add(1);
        for (int32_t seen; (seen = now.load()) != count;) samewise::sleep_while(now, seen);
        asleep.fetch_sub(1);
    }

    void finish(int64_t phase, int32_t tasks, int32_t count) {
        std::atomic<int32_t>& now = done(phase);
        if (now.fetch_add(tasks) + tasks == count && asleep.load() > 0) samewise::wake_all(now);
    }

  private:
    const int64_t stride;
    std::unique_ptr<std::atomic<int32_t>[]> counters;
    alignas(LINE) std::atomic<int32_t> asleep{0};
};

// One thread of a region.
class Team {
  public:
    Team(Phases* phases, int64_t worker) : worker(worker), phases(phases) {}

    const int64_t worker;  // below `threads`
    int64_t threads() const { return phases == nullptr ? 1 : phases->threads; }

    // The next phase: task(i) for every i below `count`. A thread takes the tasks of its own part in order, then
    // what the others have left; `before` is called ahead of its first. `alone`: not worth a second thread.
    template <class Before, class Task>
    void run(int64_t count, bool alone, Before before, Task task) {
        if (phases == nullptr) {
            if (count > 0) before();
            for (int64_t i = 0; i < count; i++) task(i);
            return;
        }
        const int64_t phase = next_phase++, parts = alone ? 1 : phases->threads;
        int32_t mine = 0;
        for (int64_t p = 0; p < parts; p++) {
            const int64_t part = (worker + p) % parts, first = count * part / parts, end = count * (part + 1) / parts;
            if (first == end) continue;
            auto& next = phases->next(phase, part);
            for (int64_t i; (i = first + next.fetch_add(1, std::memory_order_relaxed)) < end; mine++) {
                if (mine == 0) before();
                task(i);
            }
        }
        if (mine > 0) phases->finish(phase, mine, int32_t(count));
        phases->wait(phase, int32_t(count));
    }
    template <class Task>
    void run(int64_t count, bool alone, Task task) {
        run(count, alone, [] {}, task);
    }

  private:
    Phases* phases;  // null: a thread by itself
    int64_t next_phase = 0;
};

// f(team) on every thread of a region that goes through at most `count` phases.
template <class F>
void in_region(void* parallel, int64_t threads, int64_t count, F f) {
    if (parallel == nullptr || threads <= 1) {
        DefaultArithmetic arithmetic;
        f(Team(nullptr, 0));
        return;
    }
    struct Shared {
        F& f;
        Phases phases;
    } shared{f, Phases(count, threads)};
    auto work = [](void* p, int64_t worker) {
        Shared& s = *static_cast<Shared*>(p);
        DefaultArithmetic arithmetic;
        s.f(Team(&s.phases, worker));
    };
    samewise::run_region(parallel, threads, work, &shared);
}

// f(task, worker) for every task below `count`, each once, on at most `threads` workers.
template <class F>
void for_each(void* parallel, int64_t threads, int64_t count, F f) {
    in_region(parallel, std::min(threads, count), 1,
              [&](Team team) { team.run(count, false, [&](int64_t task) { f(task, team.worker); }); });
}

}  // namespace
