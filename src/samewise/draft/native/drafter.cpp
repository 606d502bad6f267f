// Draft trees for many sequences: tree_drafter.py, suffix_counts.py, estimates.py and tree.py in C++.
//
// The Python modules are the reference: the same candidates, the same sums of doubles in the same order, so
// the same trees. What each step means is said there. All state belongs to a Drafter, made and deleted through
// the C functions at the end; a function that returns a status gives 0, or -1 where memory ran out. After -1
// only recover() or drafter_delete() may follow.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

extern "C" {

// Mirrored by ctypes in drafter.py. Constants of the reference are passed, so that each is written once.
struct DrafterTuning {
    int64_t vocab;
    int64_t suffixes;  // whether texts and predictions are used
    int64_t rows;      // whether recycled candidates and runners-up are used
    int64_t max_context;
    int64_t max_successors;
    int64_t store_entries;
    int64_t max_pools;
    int64_t stored_tokens;
    int64_t min_resync;
    int64_t deep_ranks;
    int64_t num_rows;
    int64_t max_tables;
    int64_t check_nodes;
    int64_t max_length;
    int64_t num_shares;
    int64_t max_total;
    int64_t max_distance;
    int64_t own;  // indices of weights
    int64_t stored;
    int64_t recycled;
    int64_t runners_up;
    int64_t predicted;
    int64_t occurred;
    int64_t again;
    double step;
    double first_squares;
    double max_squares;
    double patience;
};

// One sequence of the next frame, or of the one that has landed. The order of its fields is that of
// samewise/follow_up.py, which says more of them.
struct FollowedSequence {
    int64_t id;
    int64_t num_rows;     // in the frame that has landed
    int64_t given;        // of them, or of the rows to come, known tokens; the others are guesses
    int64_t num_parents;  // 0: the guesses are a chain
    int64_t start;        // position of the first row
    int64_t next_given;   // above 0: known tokens that are left to read; there is nothing to judge
    int64_t next_rows;    // of them, in the next frame
    int64_t max_len;  // tokens at which it ends
    int64_t num_pages;
    int64_t num_stop_ids;
};

// Mirrored by ctypes in drafter.py. The arrays hold the sequences' numbers one after another.
struct FrameToFollow {
    int64_t num;  // of sequences
    int64_t page;  // slots of a KV page
    int64_t max_nodes;  // of a sequence's next draft
    int64_t max_depth;
    const FollowedSequence* sequences;
    const int32_t* inputs;
    const int32_t* parents;
    const int32_t* next_inputs;
    const int32_t* pages;
    const int32_t* stop_ids;
};

// Where the next frame is written, as pack.cpp reads it, and how much of it there is.
struct NextFrame {
    int32_t* numbers;
    int32_t* pages;
    int64_t num_spans, num_rows, num_moves, num_numbers, num_pages;
};

// What the frame's rows gave: `stride` numbers each, the token first, the candidates from `candidates` on (0:
// there are none).
struct FrameOutputs {
    const int32_t* rows;
    int64_t stride;
    int64_t candidates;
};
}

namespace {

constexpr int kWidth = 8;
constexpr int kMaxContext = 8;
constexpr int kMaxSuccessors = 4;
constexpr int kMaxRows = 4;
constexpr int32_t kSeparator = -1;
constexpr int32_t kRoot = -1;
constexpr int32_t kEmpty = INT32_MIN;
constexpr int kSpanLen = 6;  // numbers of a span: see pack.cpp
constexpr int32_t kNodeBase = 1 << 30;  // values from here on are nodes, others positions or counts

double chance(double log_odds) { return log_odds > -30.0 ? 1.0 / (1.0 + std::exp(-log_odds)) : 0.0; }

// ---- suffix tries --------------------------------------------------------------------------------------

// The children of all nodes of a trie, by node and token; open addressing, at most 5/8 full.
class Children {
  public:
    int32_t* find(int32_t node, int32_t token) {
        for (size_t i = place(node, token);; i = (i + 1) & mask_) {
            Slot& slot = slots_[i];
            if (slot.value == kEmpty) return nullptr;
            if (slot.node == node && slot.token == token) return &slot.value;
        }
    }

    // Fetch the place of a key that is looked up soon: in a large trie it is in no cache.
    void prefetch(int32_t node, int32_t token) const { __builtin_prefetch(&slots_[place(node, token)]); }

    // The key must be new.
    void insert(int32_t node, int32_t token, int32_t value) {
        if (8 * (size_ + 1) > 5 * slots_.size()) grow();
        put({node, token, value});
        size_++;
    }

    size_t nbytes() const { return slots_.size() * sizeof(Slot); }

  private:
    struct Slot {
        int32_t node, token, value;
    };

    size_t place(int32_t node, int32_t token) const {
        const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(node)) << 32 | static_cast<uint32_t>(token);
        return (key * 0x9E3779B97F4A7C15ull) >> shift_;
    }

    void put(const Slot& slot) {
        size_t i = place(slot.node, slot.token);
        while (slots_[i].value != kEmpty) i = (i + 1) & mask_;
        slots_[i] = slot;
    }

    void grow() {
        std::vector<Slot> old(2 * slots_.size(), Slot{0, 0, kEmpty});
        old.swap(slots_);
        mask_ = slots_.size() - 1;
        shift_--;
        for (const Slot& slot : old)
            if (slot.value != kEmpty) put(slot);
    }

    std::vector<Slot> slots_ = std::vector<Slot>(64, Slot{0, 0, kEmpty});
    size_t mask_ = 63, size_ = 0;
    int shift_ = 58;
};

// A context that occurred more than once.
struct Node {
    int32_t count = 0, total = 0, num_frequent = 0;
    int32_t frequent[kMaxSuccessors];
    int32_t times[kMaxSuccessors];  // occurrences of each
};

struct Match {
    int32_t nodes[kMaxContext + 1];  // longest context first, the empty one last
    int32_t num, position, length;
};

struct Mention {
    int32_t token, index;  // the index of source and class among the weights
};

class Trie {
  public:
    explicit Trie(const DrafterTuning& tuning) : tuning_(tuning), nodes_(1) {
        open_.nodes[0] = 0;
        open_.num = 1;
    }

    std::vector<int32_t> tokens;

    size_t num_entries() const { return tokens.size() + num_children_; }
    size_t nbytes() const {
        return tokens.capacity() * sizeof(int32_t) + nodes_.capacity() * sizeof(Node) + children_.nbytes();
    }

    void extend(const int32_t* from, size_t num) {
        for (size_t i = 0; i < num; i++) append(from[i]);
    }

    void append(int32_t token) {
        const int32_t position = static_cast<int32_t>(tokens.size()) + 1;
        tokens.push_back(token);
        Match matched;
        matched.num = 0;
        int64_t depth = open_.num;
        for (int i = 0; i < open_.num; i++) {
            const int32_t node = open_.nodes[i];
            depth--;
            int32_t* child = children_.find(node, token);
            int32_t times = 1;
            if (child == nullptr) {
                children_.insert(node, token, position);
                num_children_++;
            } else if (*child >= kNodeBase) {
                times = ++nodes_[*child - kNodeBase].count;
                matched.nodes[matched.num++] = *child - kNodeBase;
            } else if (depth >= tuning_.max_context) {
                *child = *child >= 0 ? -2 : *child - 1;
                times = -*child;
            } else {
                const int32_t opened = static_cast<int32_t>(nodes_.size());
                const int32_t before = *child;
                *child = kNodeBase + opened;  // before inserting, which may move it
                open_context(before);
                matched.nodes[matched.num++] = opened;
                times = 2;
            }
            nodes_[node].total++;
            rank(nodes_[node], token, times);
        }
        matched.nodes[matched.num++] = 0;
        open_ = matched;
    }

    void separate() {
        tokens.push_back(kSeparator);
        open_.nodes[0] = 0;
        open_.num = 1;
    }

    Match match() const {
        Match match = open_;
        match.position = -1;
        match.length = match.num - 1;
        return match;
    }

    Match find(const int32_t* suffix, size_t num) {
        Match match;
        match.nodes[0] = 0;
        match.num = 1;
        match.position = -1;
        match.length = 0;
        for (size_t i = 0; i < num; i++) match = follow(match, suffix[i]);
        return match;
    }

    void prefetch(const Match& match, int32_t token) const {
        for (int i = 0; i < match.num; i++) children_.prefetch(match.nodes[i], token);
    }

    Match follow(const Match& match, int32_t token) {
        Match found;
        found.num = 0;
        int32_t followed = -1;
        if (match.position >= 0 && match.position < static_cast<int64_t>(tokens.size()) &&
            tokens[match.position] == token)
            followed = match.position + 1;
        int32_t depth = match.num, longest = followed >= 0 ? match.length + 1 : 0;
        for (int i = 0; i < match.num; i++, depth--) {
            const int32_t* child = children_.find(match.nodes[i], token);
            if (child == nullptr) continue;
            if (*child >= kNodeBase) {
                found.nodes[found.num++] = *child - kNodeBase;
                if (!longest) longest = depth;
            } else if (*child >= 0 && followed < 0) {
                followed = *child;
                longest = depth;
            }
        }
        found.nodes[found.num++] = 0;
        found.position = followed;
        found.length = longest;
        return found;
    }

    void name(const Match& match, int64_t source, std::vector<Mention>& mentions) const {
        int64_t num = 0;
        if (match.position >= 0 && match.position < static_cast<int64_t>(tokens.size())) {
            const int64_t length = std::max<int64_t>(1, std::min<int64_t>(match.length, tuning_.max_length));
            const int32_t token = tokens[match.position];
            if (token >= 0) mentions.push_back({token, static_cast<int32_t>(source + match_class(length, 1, 1))});
            num = 1;
        }
        int64_t depth = match.num - 1;
        for (int i = 0; i < match.num && depth && num < tuning_.max_successors; i++, depth--) {
            const Node& node = nodes_[match.nodes[i]];
            for (int j = 0; j < node.num_frequent; j++)
                mentions.push_back({node.frequent[j],
                                    static_cast<int32_t>(source + match_class(depth, node.times[j], node.total))});
            num += node.num_frequent;
        }
    }

  private:
    int64_t match_class(int64_t length, int64_t count, int64_t total) const {
        const int64_t share = std::min(tuning_.num_shares * count / total, tuning_.num_shares - 1);
        return ((std::min(length, tuning_.max_length) - 1) * tuning_.num_shares + share) * tuning_.max_total +
               std::min(total, tuning_.max_total) - 1;
    }

    void open_context(int32_t position) {
        const int32_t opened = static_cast<int32_t>(nodes_.size());
        nodes_.emplace_back();
        Node& node = nodes_.back();
        node.count = 2;
        num_children_++;
        const int32_t token = position < static_cast<int64_t>(tokens.size()) ? tokens[position] : kSeparator;
        if (token == kSeparator) return;
        node.frequent[0] = token;
        node.times[0] = 1;
        node.num_frequent = 1;
        node.total = 1;
        children_.insert(opened, token, position + 1);
        num_children_++;
    }

    void rank(Node& node, int32_t token, int32_t times) {
        int i = 0;
        while (i < node.num_frequent && node.frequent[i] != token) i++;
        if (i == node.num_frequent) {
            if (node.num_frequent < tuning_.max_successors) {
                node.num_frequent++;
            } else if (node.times[i - 1] <= times) {
                i--;
            } else {
                return;
            }
        }
        for (; i && node.times[i - 1] <= times; i--) {
            node.frequent[i] = node.frequent[i - 1];
            node.times[i] = node.times[i - 1];
        }
        node.frequent[i] = token;
        node.times[i] = times;
    }

    const DrafterTuning& tuning_;
    std::vector<Node> nodes_;
    Children children_;
    Match open_;  // contexts that end the text, longest first
    size_t num_children_ = 0;
};

// ---- what is shared between requests of one salt ---------------------------------------------------------

struct Pool {
    std::vector<std::unique_ptr<Trie>> tries;  // the newer first
    uint64_t used = 0;

    size_t num_entries() const {
        size_t num = 0;
        for (const auto& trie : tries) num += trie->num_entries();
        return num;
    }

    void add(const int32_t* tokens, int64_t num, const DrafterTuning& tuning) {
        if (tries.empty()) tries.push_back(std::make_unique<Trie>(tuning));
        const int64_t half = tuning.store_entries / 2, per_token = 2 * (tuning.max_context + 1) + 1;
        const int64_t most = std::min(tuning.stored_tokens, std::max<int64_t>(1, (half - 1) / per_token));
        if (num > most) {
            tokens += num - most;
            num = most;
        }
        if (!tries[0]->tokens.empty() &&
            static_cast<int64_t>(tries[0]->num_entries()) + num * per_token + 1 > half) {
            tries.resize(1);
            tries.insert(tries.begin(), std::make_unique<Trie>(tuning));
        }
        tries[0]->extend(tokens, num);
        tries[0]->separate();
    }
};

// Candidates by token: ids plus one, 0 where there are none, so that fresh pages of memory need no filling.
struct Table {
    explicit Table(int64_t vocab) : ids(static_cast<int32_t*>(std::calloc(vocab, kWidth * sizeof(int32_t)))) {
        if (ids == nullptr) throw std::bad_alloc();
    }
    ~Table() { std::free(ids); }
    Table(const Table&) = delete;
    Table& operator=(const Table&) = delete;

    int32_t* ids;
    uint64_t used = 0;
};

// ---- sequences -------------------------------------------------------------------------------------------

struct Sibling {
    double odds;
    int32_t token;
};

// The end of a path through a tree; candidates and mentions lie in the sequence's arrays.
struct End {
    Match own, stored[2];
    int32_t depth, cursor, agreed, context;
    int32_t first_mention, num_mentions, first_sibling, num_siblings;
};

struct TreeNode {
    int32_t token, parent, depth, end;  // end: -1 until the node is expanded
    double prob;
};

struct Runners {  // of a committed row, the candidates that were not chosen
    int32_t num, ids[kWidth], ranks[kWidth];
};

struct Row {
    int32_t ids[kWidth];
};

struct Sequence {
    explicit Sequence(const DrafterTuning& tuning)
        : text(tuning), counted(tuning.suffixes != 0), seen(tuning.vocab / 64 + 1) {}

    Trie text;
    bool counted;  // whether contexts of the text are counted
    std::vector<uint64_t> seen;  // a bit per token of the text
    bool shared = false;
    std::string salt;
    std::vector<int32_t> prediction;
    size_t start = 0;
    int32_t cursor = -1, agreed = 0, lost_at = 0;
    int num_beaten = 0;
    Runners beaten[kMaxRows];
    std::unordered_map<int32_t, Row> recycled;  // where the sequence does not share
    // The last tree, as it grew.
    std::vector<TreeNode> nodes;
    std::vector<End> ends;  // the root's first
    std::vector<Mention> mentions;
    std::vector<Sibling> siblings;
    // Of the current call.
    Pool* pool = nullptr;
    Table* table = nullptr;
    int64_t max_nodes = 0, max_depth = 0, num_kept = 0;
    const int32_t *stop_ids = nullptr, *stop_ids_end = nullptr;

    bool ends_with(int32_t token) const { return std::find(stop_ids, stop_ids_end, token) != stop_ids_end; }

    bool has_seen(int32_t token) const {
        const uint64_t word = static_cast<uint32_t>(token) / 64;
        return word < seen.size() && (seen[word] >> (token % 64) & 1);
    }

    void extend(const int32_t* tokens, size_t num) {
        if (counted)
            text.extend(tokens, num);
        else
            text.tokens.insert(text.tokens.end(), tokens, tokens + num);
        for (size_t i = 0; i < num; i++) {
            const uint64_t word = static_cast<uint32_t>(tokens[i]) / 64;
            if (word < seen.size()) seen[word] |= 1ull << (tokens[i] % 64);
        }
    }

    void drop_tree() {
        nodes.clear();
        ends.clear();
        mentions.clear();
        siblings.clear();
    }

    size_t nbytes() const {
        return text.nbytes() + seen.capacity() * 8 + prediction.capacity() * 4 + recycled.size() * 64 +
               nodes.capacity() * sizeof(TreeNode) + ends.capacity() * sizeof(End) +
               mentions.capacity() * sizeof(Mention) + siblings.capacity() * sizeof(Sibling);
    }
};

// A child to add (place >= 0), or a node to expand (place < 0).
struct Waiting {
    double priority;  // minus the probability, or minus a share of it
    int64_t serial;
    double above;  // the parent's probability, or the node's
    int32_t sequence, node, end, place;
};

struct Later {
    bool operator()(const Waiting& a, const Waiting& b) const {
        return a.priority != b.priority ? a.priority > b.priority : a.serial > b.serial;
    }
};

// What nodes cost: `seconds` of a frame with 0 to `budget` nodes.
struct Prices {
    double live;
    const double* seconds;
    int64_t budget;
    double min_prob;
};

// Where trees are written: the number of nodes of each, and all nodes one tree after another.
struct Trees {
    int64_t* counts;
    int32_t *tokens, *parents;
    double *probs, *brought;
};

// A sequence's accepted rows and their tokens, which lie in the drafter's `path` and `chosen`.
struct Judged {
    Sequence* sequence;  // null: nothing to judge
    int32_t first_path, num_rows;
    int32_t num_tokens;  // of them, up to the end of the text
    bool ended;
    int64_t length;  // tokens of the sequence, the new ones among them
};

}  // namespace

// ---- the drafter -----------------------------------------------------------------------------------------

struct Drafter {
    Drafter(const DrafterTuning& given, const double* first_weights)
        : tuning(given),
          weights(first_weights, first_weights + 2 * given.again),
          squares(2 * given.again, given.first_squares) {}

    const DrafterTuning tuning;
    std::vector<double> weights, squares;
    std::unordered_map<int64_t, std::unique_ptr<Sequence>> sequences;
    std::unordered_map<std::string, std::unique_ptr<Pool>> pools;
    std::unordered_map<std::string, std::unique_ptr<Table>> tables;
    uint64_t clock = 0;
    bool damaged = false;  // memory ran out inside a call: what is shared may be incomplete
    // Kept between calls for their memory.
    std::vector<Waiting> heap;
    std::vector<Sequence*> growing;
    std::vector<std::pair<double, int32_t>> order;
    std::vector<int32_t> sorted, stack, place, first_child, next_sibling;
    std::vector<Judged> judged;
    std::vector<int32_t> path, chosen, candidates;

    Sequence* get(int64_t id) {
        const auto found = sequences.find(id);
        return found == sequences.end() ? nullptr : found->second.get();
    }

    void begin(int64_t id, const int32_t* tokens, size_t num, const char* salt, int64_t salt_len,
               const int32_t* prediction, size_t num_predicted) {
        auto sequence = std::make_unique<Sequence>(tuning);
        if (num_predicted) {
            sequence->prediction.assign(prediction, prediction + num_predicted);
            sequence->extend(prediction, num_predicted);
            sequence->text.separate();
            sequence->cursor = 0;
        }
        sequence->start = sequence->text.tokens.size();
        sequence->extend(tokens, num);
        if (salt_len >= 0) {
            sequence->shared = true;
            sequence->salt.assign(salt, salt_len);
            if (tuning.rows) open_table(sequence->salt);
        }
        sequences[id] = std::move(sequence);
    }

    void open_table(const std::string& salt) {
        auto& table = tables[salt];
        if (!table) table = std::make_unique<Table>(tuning.vocab);
        table->used = ++clock;
        drop_oldest(tables, tuning.max_tables);
    }

    template <typename Kept>
    void drop_oldest(std::unordered_map<std::string, std::unique_ptr<Kept>>& kept, int64_t most) {
        while (static_cast<int64_t>(kept.size()) > most) {
            auto oldest = kept.begin();
            for (auto i = kept.begin(); i != kept.end(); ++i)
                if (!i->second || (oldest->second && i->second->used < oldest->second->used)) oldest = i;
            kept.erase(oldest);
        }
    }

    void forget(int64_t id, bool store) {
        const auto found = sequences.find(id);
        if (found == sequences.end()) return;
        const std::unique_ptr<Sequence> sequence = std::move(found->second);
        sequences.erase(found);
        const std::vector<int32_t>& text = sequence->text.tokens;
        const int64_t num = static_cast<int64_t>(text.size() - sequence->start);
        if (!store || !tuning.suffixes || !sequence->shared || num < 2) return;
        auto& pool = pools[sequence->salt];
        if (!pool) pool = std::make_unique<Pool>();
        pool->used = ++clock;
        pool->add(text.data() + sequence->start, num, tuning);
        drop_oldest(pools, tuning.max_pools);
        while (pools.size() > 1 && stored_entries() > tuning.store_entries)
            drop_oldest(pools, static_cast<int64_t>(pools.size()) - 1);
    }

    int64_t stored_entries() const {
        size_t num = 0;
        for (const auto& [salt, pool] : pools) num += pool->num_entries();
        return static_cast<int64_t>(num);
    }

    // ---- a frame's verdicts

    void commit(Sequence& sequence, const int32_t* tokens, int64_t num, const int32_t* path,
                const int32_t* inputs, const int32_t* ids, int64_t num_rows) {
        learn(sequence, tokens, num);
        if (tuning.rows) keep_rows(sequence, tokens, num, path, inputs, ids, num_rows);
        sequence.extend(tokens, num);
        follow_prediction(sequence, tokens, num);
    }

    void learn(Sequence& sequence, const int32_t* truth, int64_t num) {
        int32_t node = kRoot;
        for (int64_t i = 0; i < num && !sequence.ends.empty(); i++) {
            const int32_t end = node == kRoot ? 0 : sequence.nodes[node].end;
            if (end >= 0) learn_end(sequence, sequence.ends[end], truth[i]);
            int32_t next = node + 1;
            const int32_t size = static_cast<int32_t>(sequence.nodes.size());
            while (next < size && (sequence.nodes[next].parent != node || sequence.nodes[next].token != truth[i]))
                next++;
            if (next == size) break;
            node = next;
        }
        sequence.drop_tree();
    }

    void learn_end(const Sequence& sequence, const End& end, int32_t truth) {
        const Mention* mentions = sequence.mentions.data() + end.first_mention;
        for (int32_t i = 0; i < end.num_mentions; i++) {
            const int32_t token = mentions[i].token;
            bool earlier = false;
            for (int32_t j = 0; j < i && !earlier; j++) earlier = mentions[j].token == token;
            if (earlier) continue;
            int32_t indices[64], num = 0;
            indices[num++] = end.context;
            indices[num++] = mentions[i].index;
            for (int32_t j = i + 1; j < end.num_mentions && num < 63; j++)
                if (mentions[j].token == token)
                    indices[num++] = mentions[j].index + static_cast<int32_t>(tuning.again);
            if (sequence.has_seen(token)) indices[num++] = static_cast<int32_t>(tuning.occurred);
            double odds = 0.0;
            for (int32_t j = 0; j < num; j++) odds += weights[indices[j]];
            const double error = (token == truth ? 1.0 : 0.0) - chance(odds);
            for (int32_t j = 0; j < num; j++) {
                double& total = squares[indices[j]];
                total = std::min(total + error * error, tuning.max_squares);
                weights[indices[j]] += tuning.step * error / std::sqrt(total);
            }
        }
    }

    void keep_rows(Sequence& sequence, const int32_t* tokens, int64_t num, const int32_t* path,
                   const int32_t* inputs, const int32_t* ids, int64_t num_rows) {
        if (!num_rows) {
            sequence.num_beaten = 0;
            return;
        }
        sequence.table = table_of(sequence);
        for (int64_t row = 0; row < num_rows; row++)
            if (std::find(path, path + num, row) == path + num) keep_row(sequence, inputs[row], ids + row * kWidth);
        for (int64_t i = 0; i < num; i++) keep_row(sequence, inputs[path[i]], ids + path[i] * kWidth);
        Runners beaten[kMaxRows];
        int kept = 0;
        for (int64_t i = num - 1; i >= 0 && kept < tuning.num_rows; i--, kept++) {
            Runners& runners = beaten[kept];
            runners.num = 0;
            for (int rank = 0; rank < kWidth; rank++) {
                const int32_t candidate = ids[path[i] * kWidth + rank];
                if (candidate == tokens[i]) continue;
                runners.ids[runners.num] = candidate;
                runners.ranks[runners.num++] = rank;
            }
        }
        for (int i = 0; i < sequence.num_beaten && kept < tuning.num_rows; i++) beaten[kept++] = sequence.beaten[i];
        std::copy(beaten, beaten + kept, sequence.beaten);
        sequence.num_beaten = kept;
    }

    Table* table_of(const Sequence& sequence) {
        if (!sequence.shared) return nullptr;
        const auto found = tables.find(sequence.salt);
        return found == tables.end() ? nullptr : found->second.get();
    }

    void keep_row(Sequence& sequence, int32_t token, const int32_t* ids) {
        if (!sequence.shared) {
            std::copy(ids, ids + kWidth, sequence.recycled[token].ids);
        } else if (sequence.table != nullptr && token >= 0 && token < tuning.vocab) {
            int32_t* row = sequence.table->ids + static_cast<int64_t>(token) * kWidth;
            for (int i = 0; i < kWidth; i++) row[i] = ids[i] + 1;
        }
    }

    void follow_prediction(Sequence& sequence, const int32_t* tokens, int64_t num) {
        const std::vector<int32_t>& predicted = sequence.prediction;
        if (predicted.empty()) return;
        const int32_t size = static_cast<int32_t>(predicted.size());
        for (int64_t i = 0; i < num; i++) {
            const int32_t cursor = sequence.cursor;
            if (cursor >= 0 && cursor < size && predicted[cursor] == tokens[i]) {
                sequence.cursor = sequence.lost_at = cursor + 1;
                sequence.agreed++;
            } else {
                sequence.cursor = -1;
                sequence.agreed = 0;
            }
        }
        if (sequence.cursor < 0) resync(sequence);
    }

    void resync(Sequence& sequence) {
        const std::vector<int32_t>&predicted = sequence.prediction, &text = sequence.text.tokens;
        const int64_t num_last =
            std::min<int64_t>(tuning.max_length, static_cast<int64_t>(text.size() - sequence.start));
        int64_t best = 0, best_end = 0;
        bool best_after = false;
        for (int64_t end = 1; end < static_cast<int64_t>(predicted.size()); end++) {
            if (predicted[end - 1] != text.back()) continue;
            int64_t num = 1;
            const int64_t most = std::min(end, num_last);
            while (num < most && predicted[end - 1 - num] == text[text.size() - 1 - num]) num++;
            const bool after = end > sequence.lost_at;
            if (num > best || (num == best && after && !best_after)) {
                best = num;
                best_after = after;
                best_end = end;
            }
        }
        if (best < tuning.min_resync) return;
        sequence.cursor = static_cast<int32_t>(best_end);
        sequence.agreed = static_cast<int32_t>(best);
    }

    // ---- growing

    // Let a sequence grow a tree at the next call of grow(). Guesses after a stop id are left out.
    void will_grow(Sequence& sequence, int64_t max_nodes, int64_t max_depth, const int32_t* stop_ids = nullptr,
                   int64_t num_stop_ids = 0) {
        sequence.max_nodes = max_nodes;
        sequence.max_depth = max_depth;
        sequence.stop_ids = stop_ids;
        sequence.stop_ids_end = stop_ids + num_stop_ids;
        growing.push_back(&sequence);
    }

    int64_t grow(const Prices& prices, const Trees& trees) {
        const auto [live, seconds, budget, min_prob] = prices;
        heap.clear();
        int64_t serial = 0;
        for (size_t i = 0; i < growing.size(); i++) {
            Sequence& sequence = *growing[i];
            set_root(sequence);
            const End& root = sequence.ends[0];
            if (sequence.max_depth > 0 && root.num_siblings) {
                const double prob = chance(sibling(sequence, root, 0).odds);
                if (prob >= min_prob) push({-prob, serial, 1.0, static_cast<int32_t>(i), kRoot, 0, 0});
            }
            serial++;
        }
        int64_t num_nodes = 0;
        double expected = 0.0, best = live / seconds[0];
        while (!heap.empty() && num_nodes < budget) {
            if (num_nodes % tuning.check_nodes == 0 &&
                !can_pay(live, seconds, budget, num_nodes, expected, -heap.front().priority, best))
                break;
            Waiting entry = pop();
            Sequence& sequence = *growing[entry.sequence];
            if (static_cast<int64_t>(sequence.nodes.size()) >= sequence.max_nodes) continue;
            serial += 2;
            if (entry.place < 0) {
                TreeNode& node = sequence.nodes[entry.node];
                node.end = expand(sequence, entry.end, node.token);
                entry.end = node.end;
                entry.place = 0;
            } else {
                const int32_t token = sequence.siblings[sequence.ends[entry.end].first_sibling + entry.place].token;
                const int32_t depth = 1 + (entry.node >= 0 ? sequence.nodes[entry.node].depth : 0);
                if (depth < sequence.max_depth)
                    push({tuning.patience * entry.priority, serial - 1, -entry.priority, entry.sequence,
                          static_cast<int32_t>(sequence.nodes.size()), entry.end, -1});
                sequence.nodes.push_back({token, entry.node, depth, -1, -entry.priority});
                num_nodes++;
                expected += -entry.priority;
                best = std::max(best, (live + expected) / seconds[num_nodes]);
                entry.place++;
            }
            const End& end = sequence.ends[entry.end];
            if (entry.place < end.num_siblings) {
                const double prob = entry.above * chance(sibling(sequence, end, entry.place).odds);
                if (prob >= min_prob)
                    push({-prob, serial, entry.above, entry.sequence, entry.node, entry.end, entry.place});
            }
        }
        return cut(live, seconds, trees);
    }

    static bool can_pay(double live, const double* seconds, int64_t budget, int64_t num, double expected, double prob,
                        double best) {
        double reached = live + expected;
        for (int64_t i = num + 1; i <= budget; i++) {
            reached += prob;
            if (reached > best * seconds[i]) return true;
        }
        return false;
    }

    void push(const Waiting& entry) {
        heap.push_back(entry);
        std::push_heap(heap.begin(), heap.end(), Later());
    }

    Waiting pop() {
        std::pop_heap(heap.begin(), heap.end(), Later());
        const Waiting entry = heap.back();
        heap.pop_back();
        return entry;
    }

    void set_root(Sequence& sequence) {
        sequence.drop_tree();
        sequence.table = table_of(sequence);
        sequence.pool = nullptr;
        if (tuning.suffixes && sequence.shared) {
            const auto found = pools.find(sequence.salt);
            if (found != pools.end()) sequence.pool = found->second.get();
        }
        const std::vector<int32_t>& text = sequence.text.tokens;
        const size_t num = std::min<size_t>(tuning.max_context, text.size() - sequence.start);
        End root;
        root.own = sequence.text.match();
        for (size_t i = 0; i < num_tries(sequence); i++)
            root.stored[i] = sequence.pool->tries[i]->find(text.data() + text.size() - num, num);
        root.depth = 0;
        root.cursor = sequence.cursor;
        root.agreed = sequence.agreed;
        name(sequence, root, text.back());
    }

    static size_t num_tries(const Sequence& sequence) {
        return sequence.pool == nullptr ? 0 : sequence.pool->tries.size();
    }

    // The index of the end after one more token.
    int32_t expand(Sequence& sequence, int32_t before, int32_t token) {
        End end;
        const End& from = sequence.ends[before];
        if (sequence.table != nullptr && token >= 0 && token < tuning.vocab)
            __builtin_prefetch(sequence.table->ids + static_cast<int64_t>(token) * kWidth);
        for (size_t i = 0; i < num_tries(sequence); i++)
            sequence.pool->tries[i]->prefetch(from.stored[i], token);
        end.own = tuning.suffixes ? sequence.text.follow(from.own, token) : from.own;
        for (size_t i = 0; i < num_tries(sequence); i++)
            end.stored[i] = sequence.pool->tries[i]->follow(from.stored[i], token);
        end.depth = from.depth + 1;
        const bool predicted = from.cursor >= 0 && from.cursor < static_cast<int64_t>(sequence.prediction.size()) &&
                               sequence.prediction[from.cursor] == token;
        end.cursor = predicted ? from.cursor + 1 : -1;
        end.agreed = predicted ? from.agreed + 1 : 0;
        name(sequence, end, token);
        return static_cast<int32_t>(sequence.ends.size()) - 1;
    }

    // Append the end, with what the sources name after it and the candidates in their order.
    void name(Sequence& sequence, End& end, int32_t token) {
        std::vector<Mention>& mentions = sequence.mentions;
        end.first_mention = static_cast<int32_t>(mentions.size());
        int64_t own_length = 0, stored_length = 0;
        bool recycled = false;
        if (tuning.suffixes) {
            own_length = end.own.length;
            if (end.cursor >= 0 && end.cursor < static_cast<int64_t>(sequence.prediction.size()))
                mentions.push_back(
                    {sequence.prediction[end.cursor],
                     static_cast<int32_t>(tuning.predicted + std::min<int64_t>(end.agreed, tuning.max_length))});
            sequence.text.name(end.own, tuning.own, mentions);
            for (size_t i = 0; i < num_tries(sequence); i++) {
                if (end.stored[i].length <= stored_length) continue;
                stored_length = end.stored[i].length;
                sequence.pool->tries[i]->name(end.stored[i], tuning.stored, mentions);
            }
        }
        if (tuning.rows) recycled = name_rows(sequence, end, token);
        const int64_t own = std::min(own_length, tuning.max_length), most = std::min(stored_length, tuning.max_length);
        end.context = static_cast<int32_t>((own * (tuning.max_length + 1) + most) * 2 + recycled);
        end.num_mentions = static_cast<int32_t>(mentions.size()) - end.first_mention;
        rank(sequence, end);
        sequence.ends.push_back(end);
    }

    bool name_rows(Sequence& sequence, const End& end, int32_t token) {
        std::vector<Mention>& mentions = sequence.mentions;
        const int64_t most = end.depth ? tuning.deep_ranks : kWidth;
        int32_t ids[kWidth];
        bool recycled = false;
        if (!sequence.shared) {
            const auto found = sequence.recycled.find(token);
            recycled = found != sequence.recycled.end() && found->second.ids[0] >= 0;
            if (recycled) std::copy(found->second.ids, found->second.ids + kWidth, ids);
        } else if (sequence.table != nullptr && token >= 0 && token < tuning.vocab) {
            const int32_t* row = sequence.table->ids + static_cast<int64_t>(token) * kWidth;
            recycled = row[0] > 0;
            for (int i = 0; i < kWidth; i++) ids[i] = row[i] - 1;
        }
        if (recycled)
            for (int64_t i = 0; i < most; i++)
                if (ids[i] >= 0) mentions.push_back({ids[i], static_cast<int32_t>(tuning.recycled + i)});
        for (int lag = 0; lag < sequence.num_beaten && lag + end.depth < tuning.max_distance; lag++) {
            const Runners& runners = sequence.beaten[lag];
            const int64_t source = tuning.runners_up + kWidth * (lag + end.depth);
            for (int64_t i = 0; i < std::min<int64_t>(most, runners.num); i++)
                if (runners.ids[i] >= 0)
                    mentions.push_back({runners.ids[i], static_cast<int32_t>(source + runners.ranks[i])});
        }
        return recycled;
    }

    void rank(Sequence& sequence, End& end) {
        const Mention* mentions = sequence.mentions.data() + end.first_mention;
        std::vector<Sibling>& siblings = sequence.siblings;
        const size_t first = siblings.size();
        const double base = weights[end.context];
        for (int32_t i = 0; i < end.num_mentions; i++) {
            size_t j = first;
            while (j < siblings.size() && siblings[j].token != mentions[i].token) j++;
            if (j == siblings.size())
                siblings.push_back({base + weights[mentions[i].index], mentions[i].token});
            else
                siblings[j].odds += weights[mentions[i].index + tuning.again];
        }
        const double more = weights[tuning.occurred];
        for (size_t j = first; j < siblings.size(); j++)
            if (sequence.has_seen(siblings[j].token)) siblings[j].odds += more;
        end.first_sibling = static_cast<int32_t>(first);
        end.num_siblings = static_cast<int32_t>(siblings.size() - first);
    }

    // The candidate of this place by falling log-odds, of equals the higher token. Places are asked for in
    // turn, and few of them: each is found when it is asked for.
    static const Sibling& sibling(Sequence& sequence, const End& end, int32_t place) {
        Sibling* first = sequence.siblings.data() + end.first_sibling;
        Sibling *last = first + end.num_siblings, *best = first + place;
        for (Sibling* other = best + 1; other < last; other++)
            if (other->odds > best->odds || (other->odds == best->odds && other->token > best->token)) best = other;
        std::swap(first[place], *best);
        return first[place];
    }

    // ---- cutting

    int64_t cut(double live, const double* seconds, const Trees& trees) {
        order.clear();
        for (size_t i = 0; i < growing.size(); i++) {
            growing[i]->num_kept = 0;
            for (const TreeNode& node : growing[i]->nodes) order.emplace_back(node.prob, static_cast<int32_t>(i));
        }
        std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
            return a.first != b.first ? a.first > b.first : a.second < b.second;
        });
        double best = live / seconds[0], expected = 0.0;
        size_t num = 0;
        *trees.brought = 0.0;
        for (size_t i = 0; i < order.size(); i++) {
            expected += order[i].first;
            const double throughput = (live + expected) / seconds[i + 1];
            if (throughput > best) {
                best = throughput;
                num = i + 1;
                *trees.brought = expected;
            }
        }
        for (size_t i = 0; i < num; i++) growing[order[i].second]->num_kept++;
        int64_t written = 0;
        for (size_t i = 0; i < growing.size(); i++) {
            trees.counts[i] = 0;
            if (growing[i]->num_kept)
                trees.counts[i] =
                    write(*growing[i], trees.tokens + written, trees.parents + written, trees.probs + written);
            written += trees.counts[i];
        }
        return written;
    }

    // The most probable nodes, depth first, the likeliest child first. Returns their number.
    int32_t write(const Sequence& sequence, int32_t* tokens, int32_t* parents, double* probs) {
        const std::vector<TreeNode>& nodes = sequence.nodes;
        const int32_t size = static_cast<int32_t>(nodes.size());
        sorted.resize(size);
        for (int32_t i = 0; i < size; i++) sorted[i] = i;
        std::stable_sort(sorted.begin(), sorted.end(),
                         [&](int32_t a, int32_t b) { return nodes[a].prob > nodes[b].prob; });
        // Lists of children by node, the root's at 0; the least likely is linked first and ends up last.
        first_child.assign(size + 1, -1);
        next_sibling.assign(size, -1);
        place.assign(size + 1, kRoot);
        for (int64_t i = sequence.num_kept - 1; i >= 0; i--) {
            const int32_t node = sorted[i], parent = nodes[node].parent + 1;
            next_sibling[node] = first_child[parent];
            first_child[parent] = node;
        }
        stack.clear();
        if (first_child[0] >= 0) stack.push_back(first_child[0]);
        int32_t written = 0;
        while (!stack.empty()) {
            const int32_t node = stack.back();
            stack.pop_back();
            tokens[written] = nodes[node].token;
            parents[written] = place[nodes[node].parent + 1];
            probs[written] = nodes[node].prob;
            place[node + 1] = written++;
            if (next_sibling[node] >= 0) stack.push_back(next_sibling[node]);
            if (first_child[node + 1] >= 0 && !sequence.ends_with(nodes[node].token))
                stack.push_back(first_child[node + 1]);
        }
        return written;
    }

    // ---- from a frame's outputs to the next frame

    // Judge every sequence as judge.py does. False, and nothing is changed: one is not known or lacks pages, or
    // all have ended.
    bool judge(const FrameToFollow& frame, const FrameOutputs& outputs) {
        judged.clear();
        path.clear();
        chosen.clear();
        const int32_t *inputs = frame.inputs, *parents = frame.parents, *stop_ids = frame.stop_ids;
        const int32_t* row = outputs.rows;
        bool any_left = false;
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            Judged one{nullptr, static_cast<int32_t>(path.size()), 0, 0, false, 0};
            if (!followed.next_given) {
                one.sequence = get(followed.id);
                if (one.sequence == nullptr) return false;
                const int64_t first = followed.given - 1;
                accept(followed, inputs + first, parents, row + first * outputs.stride, outputs.stride, one);
                end(followed, stop_ids, one);
                if (one.length > followed.num_pages * frame.page) return false;
            }
            any_left = any_left || (one.sequence != nullptr ? !one.ended : followed.next_rows > 0);
            judged.push_back(one);
            inputs += followed.num_rows;
            parents += followed.num_parents;
            stop_ids += followed.num_stop_ids;
            row += followed.num_rows * outputs.stride;
        }
        return any_left;
    }

    // The path of right guesses; all pointers are at the last known token's row.
    void accept(const FollowedSequence& followed, const int32_t* inputs, const int32_t* parents, const int32_t* row,
                int64_t stride, Judged& one) {
        for (int64_t at = 0; at >= 0; at = child(followed, inputs, parents, at, row[at * stride])) {
            path.push_back(static_cast<int32_t>(at));
            chosen.push_back(row[at * stride]);
            one.num_rows++;
        }
    }

    // The row of the first guess after row `at` that is this token; -1: there is none.
    static int64_t child(const FollowedSequence& followed, const int32_t* inputs, const int32_t* parents, int64_t at,
                         int32_t token) {
        const int64_t num_rows = followed.num_rows - followed.given + 1;
        if (!followed.num_parents) return at + 1 < num_rows && inputs[at + 1] == token ? at + 1 : -1;
        for (int64_t next = at + 1; next < num_rows; next++)
            if (parents[next - 1] == at - 1 && inputs[next] == token) return next;
        return -1;
    }

    // Where the new tokens end the text, if they do.
    void end(const FollowedSequence& followed, const int32_t* stop_ids, Judged& one) const {
        const int64_t known = followed.start + followed.given;
        const int32_t *tokens = chosen.data() + one.first_path, *last_stop = stop_ids + followed.num_stop_ids;
        while (!one.ended && one.num_tokens < one.num_rows) {
            one.ended = std::find(stop_ids, last_stop, tokens[one.num_tokens]) != last_stop;
            one.num_tokens++;
            one.ended = one.ended || known + one.num_tokens >= followed.max_len;
        }
        one.length = known + one.num_tokens;
    }

    // Commit what was judged, grow the next trees and write the next frame.
    int64_t follow_up(const FrameToFollow& frame, const FrameOutputs& outputs, const Prices& prices,
                      const Trees& trees, NextFrame& next) {
        const int32_t *inputs = frame.inputs, *row = outputs.rows, *stop_ids = frame.stop_ids;
        growing.clear();
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            const Judged& one = judged[i];
            if (one.sequence != nullptr) {
                const int64_t first = followed.given - 1;
                commit_judged(followed, inputs + first, row + first * outputs.stride, outputs, one);
                const int64_t room = followed.num_pages * frame.page - one.length;
                if (!one.ended)
                    will_grow(*one.sequence, std::min(frame.max_nodes, room),
                              std::min(frame.max_depth, followed.max_len - one.length - 1), stop_ids,
                              followed.num_stop_ids);
            }
            inputs += followed.num_rows;
            stop_ids += followed.num_stop_ids;
            row += followed.num_rows * outputs.stride;
        }
        const int64_t num_nodes = grow(prices, trees);
        int64_t grown = static_cast<int64_t>(growing.size());
        for (int64_t i = frame.num - 1; i >= 0; i--)
            trees.counts[i] = judged[i].sequence != nullptr && !judged[i].ended ? trees.counts[--grown] : 0;
        write_frame(frame, trees, next);
        return num_nodes;
    }

    void commit_judged(const FollowedSequence& followed, const int32_t* inputs, const int32_t* row,
                       const FrameOutputs& outputs, const Judged& one) {
        const int64_t num_rows = outputs.candidates ? followed.num_rows - followed.given + 1 : 0;
        candidates.resize(num_rows * kWidth);
        for (int64_t j = 0; j < num_rows; j++) {
            const int32_t* ids = row + j * outputs.stride + outputs.candidates;
            std::copy(ids, ids + kWidth, candidates.data() + j * kWidth);
        }
        commit(*one.sequence, chosen.data() + one.first_path, one.num_tokens, path.data() + one.first_path, inputs,
               candidates.data(), num_rows);
    }

    void write_frame(const FrameToFollow& frame, const Trees& trees, NextFrame& next) {
        const int32_t *tokens = trees.tokens, *parents = trees.parents;
        const int32_t *pages = frame.pages, *known = frame.next_inputs;
        std::vector<int32_t>&inputs = sorted, &used_parents = stack;  // those of trees that are no chains
        inputs.clear();
        used_parents.clear();
        int32_t *number = next.numbers, *page = next.pages;
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            const Judged& one = judged[i];
            const int32_t num_pages = static_cast<int32_t>(followed.num_pages);
            const bool in_frame = followed.next_given ? followed.next_rows > 0 : !one.ended;
            if (followed.next_rows) {
                const int64_t start = followed.start + followed.num_rows;
                number = write_span(number, followed.next_rows, followed.next_given, start, num_pages, 0);
                inputs.insert(inputs.end(), known, known + followed.next_rows);
                known += followed.next_rows;
            } else if (in_frame) {
                const int32_t count = static_cast<int32_t>(trees.counts[i]);
                bool chain = true;
                for (int32_t node = 0; node < count; node++) chain = chain && parents[node] == node - 1;
                number = write_span(number, 1 + count, 1, one.length - 1, num_pages, chain ? 0 : count);
                inputs.push_back(chosen[one.first_path + one.num_tokens - 1]);
                inputs.insert(inputs.end(), tokens, tokens + count);
                if (!chain) used_parents.insert(used_parents.end(), parents, parents + count);
                tokens += count;
                parents += count;
            }
            if (in_frame) page = std::copy(pages, pages + num_pages, page);
            pages += num_pages;
        }
        next.num_spans = (number - next.numbers) / kSpanLen;
        next.num_rows = static_cast<int64_t>(inputs.size());
        next.num_pages = page - next.pages;
        number = std::copy(inputs.begin(), inputs.end(), number);
        number = std::copy(used_parents.begin(), used_parents.end(), number);
        int32_t* moved = write_moves(frame, number);
        next.num_moves = (moved - number) / 2;
        next.num_numbers = moved - next.numbers;
    }

    static int32_t* write_span(int32_t* number, int64_t rows, int64_t given, int64_t start, int32_t num_pages,
                               int32_t num_parents) {
        const int32_t fields[kSpanLen] = {static_cast<int32_t>(rows),  static_cast<int32_t>(given),
                                          static_cast<int32_t>(start), -1,
                                          num_pages,                   num_parents};
        return std::copy(fields, fields + kSpanLen, number);
    }

    // Slots (from, to) of accepted guesses of trees that do not stand at their positions.
    int32_t* write_moves(const FrameToFollow& frame, int32_t* moves) const {
        const int32_t* pages = frame.pages;
        const int32_t page = static_cast<int32_t>(frame.page);
        for (int64_t i = 0; i < frame.num; i++) {
            const FollowedSequence& followed = frame.sequences[i];
            const Judged& one = judged[i];
            const int32_t* rows = path.data() + one.first_path;
            const int32_t root = static_cast<int32_t>(followed.start + followed.given - 1);
            for (int32_t level = 1; level < one.num_rows && followed.num_parents; level++) {
                if (rows[level] == level) continue;
                for (const int32_t position : {root + rows[level], root + level})
                    *moves++ = pages[position / page] * page + position % page;
            }
            pages += followed.num_pages;
        }
        return moves;
    }

    // ---- the whole

    void recover() {
        sequences.clear();
        growing.clear();
        if (damaged) {
            pools.clear();
            tables.clear();
            damaged = false;
        }
    }

    void clear() {
        pools.clear();
        tables.clear();
        for (auto& [id, sequence] : sequences) {
            sequence->drop_tree();
            sequence->num_beaten = 0;
            sequence->recycled.clear();
            if (tuning.rows && sequence->shared) open_table(sequence->salt);
        }
    }

    void memory(int64_t* bytes) const {
        bytes[0] = static_cast<int64_t>(tables.size()) * tuning.vocab * kWidth * 4;
        bytes[1] = bytes[2] = 0;
        for (const auto& [salt, pool] : pools)
            for (const auto& trie : pool->tries) bytes[1] += static_cast<int64_t>(trie->nbytes());
        for (const auto& [id, sequence] : sequences) bytes[2] += static_cast<int64_t>(sequence->nbytes());
    }
};

namespace {

// Run a call; no exception may reach C.
template <typename Call>
int64_t guarded(Drafter* drafter, Call call) {
    try {
        return call();
    } catch (...) {
        drafter->damaged = true;
        return -1;
    }
}

}  // namespace

extern "C" {

Drafter* drafter_new(const DrafterTuning* tuning, const double* first_weights) {
    if (tuning->max_context > kMaxContext || tuning->max_successors > kMaxSuccessors || tuning->num_rows > kMaxRows)
        return nullptr;
    try {
        return new Drafter(*tuning, first_weights);
    } catch (...) {
        return nullptr;
    }
}

void drafter_delete(Drafter* drafter) { delete drafter; }

int64_t drafter_begin(Drafter* drafter, int64_t id, const int32_t* tokens, int64_t num, const char* salt,
                      int64_t salt_len, const int32_t* prediction, int64_t num_predicted) {
    return guarded(drafter, [&] {
        drafter->begin(id, tokens, num, salt, salt_len, prediction, num_predicted);
        return 0;
    });
}

// `num_tokens` and `num_rows` by sequence; `tokens` and `path` (the row that chose each token), `inputs` and
// `ids` [rows, 8] of all sequences one after another. Sequences that are not known are passed over.
int64_t drafter_commit(Drafter* drafter, int64_t num, const int64_t* ids, const int64_t* num_tokens,
                       const int32_t* tokens, const int32_t* path, const int64_t* num_rows, const int32_t* inputs,
                       const int32_t* candidates) {
    return guarded(drafter, [&] {
        for (int64_t i = 0; i < num; i++) {
            Sequence* sequence = drafter->get(ids[i]);
            if (sequence != nullptr)
                drafter->commit(*sequence, tokens, num_tokens[i], path, inputs, candidates, num_rows[i]);
            tokens += num_tokens[i];
            path += num_tokens[i];
            inputs += num_rows[i];
            candidates += num_rows[i] * kWidth;
        }
        return 0;
    });
}

// The number of nodes of all trees, at most `budget`; `counts` by sequence, the other outputs one tree after
// another; -2 for an unknown sequence, -1 where memory ran out. `seconds` has budget + 1 entries.
int64_t drafter_grow(Drafter* drafter, int64_t num, const int64_t* ids, const int64_t* max_nodes,
                     const int64_t* max_depths, double live, const double* seconds, int64_t budget, double min_prob,
                     int64_t* counts, int32_t* tokens, int32_t* parents, double* probs, double* brought) {
    for (int64_t i = 0; i < num; i++)
        if (drafter->get(ids[i]) == nullptr) return -2;
    return guarded(drafter, [&] {
        drafter->growing.clear();
        for (int64_t i = 0; i < num; i++) drafter->will_grow(*drafter->get(ids[i]), max_nodes[i], max_depths[i]);
        return drafter->grow({live, seconds, budget, min_prob}, {counts, tokens, parents, probs, brought});
    });
}

// The verdicts of a frame, then trees as drafter_grow() gives them, with a count for every sequence, and the next
// frame. -3, and nothing is changed: a sequence is not known or has too few pages, or all have ended.
int64_t drafter_follow_up(Drafter* drafter, const FrameToFollow* frame, const FrameOutputs* outputs, double live,
                          const double* seconds, int64_t budget, double min_prob, int64_t* counts, int32_t* tokens,
                          int32_t* parents, double* probs, double* brought, NextFrame* next) {
    return guarded(drafter, [&]() -> int64_t {
        if (!drafter->judge(*frame, *outputs)) return -3;
        return drafter->follow_up(*frame, *outputs, {live, seconds, budget, min_prob},
                                  {counts, tokens, parents, probs, brought}, *next);
    });
}

int64_t drafter_forget(Drafter* drafter, int64_t id, int64_t store) {
    return guarded(drafter, [&] {
        drafter->forget(id, store != 0);
        return 0;
    });
}

void drafter_recover(Drafter* drafter) { drafter->recover(); }

int64_t drafter_clear(Drafter* drafter) {
    return guarded(drafter, [&] {
        drafter->clear();
        return 0;
    });
}

// Bytes of tables, stored texts and sequences.
void drafter_memory(const Drafter* drafter, int64_t* bytes) { drafter->memory(bytes); }

// The weights of the estimates, 2 * again of them.
const double* drafter_weights(const Drafter* drafter) { return drafter->weights.data(); }
}
