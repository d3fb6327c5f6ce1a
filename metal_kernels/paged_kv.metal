// Shared by the attention kernels: where a position's K and V are, and reading them as pieces of floats.
//
// Pool blocks are dense (BITS 0) or quantised (BITS 8 or 4): codes of BITS bits, lowest bits first, and
//     key   = code * k_scales[block, head, 0, channel] + k_scales[block, head, 1, channel]
//     value = code * v_scales[block, head, token, 0]   + v_scales[block, head, token, 1]
// The tail and a chunk's own K and V are always dense.

// `token` indexes [tokens, width]: of the pool if `pooled`, else of the tail.
struct Place {
  long token;
  bool pooled;
};

// `table` starts at block number `first_block`; `tail_row` is the first token of the row's slot and head.
METAL_FUNC Place locate(
    int position, int flushed, const device int* table, int first_block, int kv_head, int kv_heads,
    int block_shift, long tail_row, int tail_len) {
  Place place;
  place.pooled = position < flushed;
  if (place.pooled) {
    const long block = long(table[(position >> block_shift) - first_block]) * kv_heads + kv_head;
    place.token = (block << block_shift) + (position & ((1 << block_shift) - 1));
  } else {
    place.token = tail_row + position % tail_len;
  }
  return place;
}

// A piece of codes: 16 / sizeof(T) of them, so BITS / (8 sizeof(T)) of 16 bytes.
template <typename T, int BITS>
METAL_FUNC Piece<T> load_codes(const device uchar* pool, long element, bool valid) {
  constexpr int PIECE = 16 / sizeof(T);
  constexpr int BYTES = PIECE * BITS / 8;
  const device uchar* source = pool + element * BITS / 8;
  ulong bits = 0;
  if (valid) {
    bits = BYTES == 8 ? *reinterpret_cast<const device ulong*>(source)
        : BYTES == 4  ? *reinterpret_cast<const device uint*>(source)
                      : *reinterpret_cast<const device ushort*>(source);
  }
  Piece<T> piece;
  UNROLL for (int i = 0; i < PIECE / 2; i++) {
    const ulong pair = bits >> (2 * i * BITS);
    piece.pair[i] = float2(pair & ((1 << BITS) - 1), pair >> BITS & ((1 << BITS) - 1));
  }
  return piece;
}

// Channels [channel, channel + PIECE) of the key `offset` tokens after `place`; zeros if not valid.
template <typename T, int BITS, int WIDTH, typename Pool>
METAL_FUNC Piece<T> load_key(
    const device Pool* pool, const device T* tail, const device T* scales, Place place, int block_shift,
    int offset, int channel, bool valid) {
  const long element = (place.token + offset) * WIDTH + channel;
  if (!place.pooled) {
    return load_piece(tail + element, valid);
  }
  if (BITS == 0) {
    return load_piece(reinterpret_cast<const device T*>(pool) + element, valid);
  }
  Piece<T> key = load_codes<T, BITS>(reinterpret_cast<const device uchar*>(pool), element, valid);
  const device T* block_scales = scales + (place.token >> block_shift) * 2 * WIDTH + channel;
  const Piece<T> scale = load_piece(block_scales, valid);
  const Piece<T> bias = load_piece(block_scales + WIDTH, valid);
  UNROLL for (int i = 0; i < 8 / int(sizeof(T)); i++) {
    key.pair[i] = key.pair[i] * scale.pair[i] + bias.pair[i];
  }
  return key;
}

template <typename T, int BITS, int WIDTH, typename Pool>
METAL_FUNC Piece<T> load_value(
    const device Pool* pool, const device T* tail, const device T* scales, Place place, int offset, int channel,
    bool valid) {
  const long element = (place.token + offset) * WIDTH + channel;
  if (!place.pooled) {
    return load_piece(tail + element, valid);
  }
  if (BITS == 0) {
    return load_piece(reinterpret_cast<const device T*>(pool) + element, valid);
  }
  Piece<T> value = load_codes<T, BITS>(reinterpret_cast<const device uchar*>(pool), element, valid);
  const device T* token_scales = scales + 2 * (place.token + offset);
  const float scale = valid ? float(token_scales[0]) : 0;
  const float bias = valid ? float(token_scales[1]) : 0;
  UNROLL for (int i = 0; i < 8 / int(sizeof(T)); i++) {
    value.pair[i] = value.pair[i] * scale + bias;
  }
  return value;
}
