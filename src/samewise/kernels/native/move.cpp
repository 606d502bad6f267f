// Move K and V of single slots between the pages of attention.cpp, bit for bit.
//
// All slots are read before any is written: a slot may be a source and another pair's target.

#include "calls.h"

#include <cstring>
#include <vector>

namespace {

constexpr int64_t PAGE = 16;

template <class Stored>
void move_head(Stored* k, Stored* v, int64_t dim, int64_t page_len, const Move& m, std::vector<Stored>& room) {
    for (int64_t i = 0; i < m.count; i++) {
        const Stored* from = k + m.sources[i] / PAGE * page_len + m.sources[i] % PAGE;
        for (int64_t d = 0; d < dim; d++) room[i * dim + d] = from[d * PAGE];
    }
    for (int64_t i = 0; i < m.count; i++) {
        Stored* to = k + m.targets[i] / PAGE * page_len + m.targets[i] % PAGE;
        for (int64_t d = 0; d < dim; d++) to[d * PAGE] = room[i * dim + d];
    }
    auto value = [&](int64_t slot) { return v + slot / PAGE * page_len + slot % PAGE * dim; };
    for (int64_t i = 0; i < m.count; i++) std::memcpy(&room[i * dim], value(m.sources[i]), sizeof(Stored) * dim);
    for (int64_t i = 0; i < m.count; i++) std::memcpy(value(m.targets[i]), &room[i * dim], sizeof(Stored) * dim);
}

template <class Stored>
void move_slots(const Move& m) {
    std::vector<Stored> room;
    for (int64_t i = 0; i < m.num_layers; i++) {
        const LayerPages& l = m.layers[i];
        const int64_t head_len = PAGE * l.dim, page_len = l.kv_heads * head_len;
        room.resize(m.count * l.dim);
        for (int64_t head = 0; head < l.kv_heads; head++)
            move_head(static_cast<Stored*>(l.k_pages) + head * head_len,
                      static_cast<Stored*>(l.v_pages) + head * head_len, l.dim, page_len, m, room);
    }
}

}  // namespace

// 2: a slot outside the pages; 3: elements of another size than 2 or 4 bytes.
extern "C" int samewise_move(const Move* move) {
    for (int64_t i = 0; i < move->count; i++)
        for (int64_t slot : {move->sources[i], move->targets[i]})
            if (slot < 0 || slot >= move->num_pages * PAGE) return 2;
    return guarded([&] {
        switch (move->item) {
            case 2: move_slots<uint16_t>(*move); return DONE;
            case 4: move_slots<uint32_t>(*move); return DONE;
            default: return 3;
        }
    });
}
