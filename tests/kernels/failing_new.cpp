// An operator new that fails when the test says so, for test_memory.py. Built with symbols bound within the library.

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> left{-1};  // allocations until one fails; below 0: none does

void* allocate(std::size_t size, std::size_t alignment) {
    if (left.load() >= 0 && left.fetch_sub(1) == 0) throw std::bad_alloc();
    void* p = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment + (size == 0) * alignment);
    if (p == nullptr) throw std::bad_alloc();
    return p;
}

}  // namespace

extern "C" void fail_after(long allocations) { left = allocations; }
extern "C" bool has_failed() { return left.load() < 0; }

void* operator new(std::size_t size) { return allocate(size, 16); }
void* operator new[](std::size_t size) { return allocate(size, 16); }
void* operator new(std::size_t size, std::align_val_t alignment) { return allocate(size, std::size_t(alignment)); }
void* operator new[](std::size_t size, std::align_val_t alignment) { return allocate(size, std::size_t(alignment)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
