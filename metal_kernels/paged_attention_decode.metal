// Paged attention of decode rows: one chunk of one row's context per threadgroup and KV head.
//
// Every query of a KV head (its group of heads times q_len, at most 8 TILES a threadgroup) is served by one
// read of K and V. Positions [0, flushed) live in pool blocks, [flushed, length) in the row's tail ring; a
// chunk is [c chunk, (c + 1) chunk) of positions whatever their place, so that neither the batch nor the time
// of a flush changes a result.
//
// Each simdgroup takes 16 tokens at a time and keeps, transposed, 8 queries per tile:
//     S^T [8 tokens x 8 queries] = K Q^T          O^T [8 channels x 8 queries] += V^T P^T
// Both K and V go from device memory to registers in 16-byte pieces, 64 and 128 neighbouring bytes a token.
// The softmax is online and in base 2. At the end the simdgroups' results are merged.
//
// Template  T float16, bfloat16 or float32; BITS of pool blocks: 0 for T, or 8 or 4 (paged_kv.metal);
//           D, DV widths of K and V, multiples of 8; TILES query tiles;
//           SIMDGROUPS per threadgroup; DIRECT: every row has one chunk, so the result is final;
//           Out: T if DIRECT, else float
// Inputs    queries [R, Hk G, q_len, D] T
//           pool_k [N, Hk, B, D], pool_v [N, Hk, B, DV] T, or uint8 [N, Hk, B, D or DV * BITS / 8] and
//           k_scales [N, Hk, 2, D], v_scales [N, Hk, B, 2] T
//           tail_k [S, Hk, tail_len, D], tail_v [S, Hk, tail_len, DV] T
//           tables [R, table_width] int32       row_info [R, 3] int32: slot, flushed, first_block
//           row_length [R] int32                work [W, 2] int32: row, chunk number
//           dims int32: Hk, G, q_len, log2 B, tail_len, table_width, window, chunk, has_sinks
//           factors float: scale log2(e) and 0, or scale / softcap and softcap log2(e)
//           sink_logits [Hk G] float            (metadata is padded to 8 elements or more)
// Outputs   attended, Out: if DIRECT [R, Hk G, q_len, DV]; else [W, Hk G q_len, DV], unnormalised
//           stats [W, Hk G q_len, 2] float: maximum (base 2) and sum; where the sum is 0 nothing was attended
// Grid      (32 SIMDGROUPS query_tiles, Hk, W) threads, threadgroups of 32 SIMDGROUPS
// Limits    block size and tail_len multiples of 8, chunk of 16; TILES DV up to 256 keeps the accumulators in 64
//           registers a lane

//@body
  constexpr int PIECE = 16 / sizeof(T);
  constexpr int K_PIECES = (D + 4 * PIECE - 1) / (4 * PIECE);   // a lane's pieces of a token: 4 lanes share it
  constexpr int V_PIECES = (DV + 8 * PIECE - 1) / (8 * PIECE);  // 8 lanes share it
  constexpr int SLAB = 8 * PIECE;                               // channels that one V piece of all lanes covers

  const uint lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int thread_index = thread_index_in_threadgroup;
  const int frow = fragment_row(lane);
  const int fcol = fragment_col(lane);

  const int kv_heads = dims[0], group = dims[1], q_len = dims[2], block_shift = dims[3];
  const int tail_len = dims[4], table_width = dims[5], window = dims[6], chunk = dims[7];
  const float scale = factors[0], cap = factors[1];
  const int num_queries = group * q_len;
  const int first_query = 8 * TILES * int(threadgroup_position_in_grid.x);
  const int kv_head = threadgroup_position_in_grid.y;
  const int work_index = threadgroup_position_in_grid.z;
  const int row = work[2 * work_index];
  const int slot = row_info[3 * row], flushed = row_info[3 * row + 1], first_block = row_info[3 * row + 2];
  const int length = row_length[row];
  const device int* table = tables + long(row) * table_width;
  const long tail_row = (long(slot) * kv_heads + kv_head) * tail_len;

  // The positions that some query of this row can see, cut to this chunk.
  const int chunk_start = work[2 * work_index + 1] * chunk;
  const int begin = max(chunk_start, max(0, length - q_len + 1 - window));
  const int end = min(chunk_start + chunk, length);
  const long query_row = (long(row) * kv_heads + kv_head) * num_queries + first_query;
  const long chunk_row = (long(work_index) * kv_heads + kv_head) * num_queries + first_query;

  // Queries in threadgroup memory, in the order in which lanes read them: lane (frow, fcol) of K piece j needs
  // channels (4 j + frow / 2) PIECE + frow % 2 + 2 i of queries fcol and fcol + 1.
  threadgroup uint4 query_pieces[TILES * K_PIECES * 32];
  for (int at = thread_index; at < TILES * K_PIECES * 32; at += 32 * SIMDGROUPS) {
    const int tile = at / (32 * K_PIECES), piece = at / 32 % K_PIECES;
    const int channel = (4 * piece + fragment_row(at % 32) / 2) * PIECE + fragment_row(at % 32) % 2;
    const int query = 8 * tile + fragment_col(at % 32);
    const device T* source = queries + (query_row + query) * D + channel;
    query_pieces[at] = interleave(
        source, source + D, channel < D && first_query + query < num_queries,
        channel < D && first_query + query + 1 < num_queries);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  int2 newest[TILES];  // the last position that queries fcol and fcol + 1 of a tile see
  float2 best[TILES], total[TILES];
  float2 acc[TILES][V_PIECES * PIECE];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    const int query = first_query + 8 * tile + fcol;
    newest[tile] = length - q_len + int2(query % q_len, (query + 1) % q_len);
    best[tile] = float2(NO_SCORE);
    total[tile] = 0;
    UNROLL for (int i = 0; i < V_PIECES * PIECE; i++) {
      acc[tile][i] = 0;
    }
  }

  for (int start = (begin & ~15) + 16 * simdgroup; start < end; start += 16 * SIMDGROUPS) {
    // Eight tokens lie side by side, in one block or in the tail.
    Place places[2];
    UNROLL for (int half_tile = 0; half_tile < 2; half_tile++) {
      const int position = max(start + 8 * half_tile, begin & ~7);
      places[half_tile] = locate(
          position, flushed, table, first_block, kv_head, kv_heads, block_shift, tail_row, tail_len);
    }

    float2 scores[TILES][2];
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      scores[tile][0] = scores[tile][1] = 0;
    }
    UNROLL for (int j = 0; j < K_PIECES; j++) {
      const int channel = (4 * j + fcol / 2) * PIECE;
      Piece<T> query[TILES];
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        query[tile].unpack(query_pieces[(tile * K_PIECES + j) * 32 + lane]);
      }
      UNROLL for (int half_tile = 0; half_tile < 2; half_tile++) {
        const int position = start + 8 * half_tile + frow;
        const bool valid = position >= begin && position < end && channel < D;
        const Piece<T> key = load_key<T, BITS, D>(
            pool_k, tail_k, k_scales, places[half_tile], block_shift, frow, channel, valid);
        UNROLL for (int i = 0; i < PIECE / 2; i++) {
          UNROLL for (int tile = 0; tile < TILES; tile++) {
            multiply_add(scores[tile][half_tile], key.pair[i], query[tile].pair[i]);
          }
        }
      }
    }

    UNROLL for (int tile = 0; tile < TILES; tile++) {
      UNROLL for (int half_tile = 0; half_tile < 2; half_tile++) {
        const int position = start + 8 * half_tile + frow;
        scores[tile][half_tile] =
            visible_score(scores[tile][half_tile], scale, cap, position, newest[tile], window);
      }
      online_softmax(scores[tile], best[tile], total[tile], acc[tile]);
    }

    UNROLL for (int half_tile = 0; half_tile < 2; half_tile++) {
      const int position = start + 8 * half_tile + fcol;
      const bool valid = position >= begin && position < end;
      const bool next_valid = position + 1 >= begin && position + 1 < end;
      UNROLL for (int j = 0; j < V_PIECES; j++) {
        const int channel = (8 * j + frow) * PIECE;
        const Piece<T> value = load_value<T, BITS, DV>(
            pool_v, tail_v, v_scales, places[half_tile], fcol, channel, valid && channel < DV);
        const Piece<T> next = load_value<T, BITS, DV>(
            pool_v, tail_v, v_scales, places[half_tile], fcol + 1, channel, next_valid && channel < DV);
        UNROLL for (int i = 0; i < PIECE; i++) {
          const float2 pair = float2(value.pair[i / 2][i % 2], next.pair[i / 2][i % 2]);
          UNROLL for (int tile = 0; tile < TILES; tile++) {
            multiply_add(acc[tile][j * PIECE + i], pair, scores[tile][half_tile]);
          }
        }
      }
    }
  }

  // Merge the simdgroups: first the softmax statistics, then the values, one slab of channels at a time.
  threadgroup float2 part_stats[SIMDGROUPS][8 * TILES];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    total[tile] = sum_over_rows(total[tile]);
    if (frow == 0) {
      part_stats[simdgroup][8 * tile + fcol] = float2(best[tile].x, total[tile].x);
      part_stats[simdgroup][8 * tile + fcol + 1] = float2(best[tile].y, total[tile].y);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  threadgroup float2 chunk_stats[8 * TILES];
  threadgroup float slab[SIMDGROUPS][8][SLAB];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    float2 top = float2(NO_SCORE), sum = 0;
    UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
      top = max(top, float2(part_stats[s][8 * tile + fcol].x, part_stats[s][8 * tile + fcol + 1].x));
    }
    UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
      const float2 x = part_stats[s][8 * tile + fcol], y = part_stats[s][8 * tile + fcol + 1];
      sum += float2(x.y, y.y) * fast::exp2(float2(x.x, y.x) - top);
    }
    if (thread_index < 32 && frow == 0) {
      chunk_stats[8 * tile + fcol] = float2(top.x, sum.x);
      chunk_stats[8 * tile + fcol + 1] = float2(top.y, sum.y);
    }
    const float2 weight = fast::exp2(best[tile] - top);

    UNROLL for (int j = 0; j < V_PIECES; j++) {
      UNROLL for (int i = 0; i < PIECE; i++) {
        slab[simdgroup][fcol][frow * PIECE + i] = acc[tile][j * PIECE + i].x * weight.x;
        slab[simdgroup][fcol + 1][frow * PIECE + i] = acc[tile][j * PIECE + i].y * weight.y;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int at = thread_index; at < 8 * SLAB; at += 32 * SIMDGROUPS) {
        const int query = 8 * tile + at / SLAB, channel = j * SLAB + at % SLAB;
        if (first_query + query >= num_queries || channel >= DV) {
          continue;
        }
        float value = 0;
        UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
          value += slab[s][at / SLAB][at % SLAB];
        }
        const float2 found = chunk_stats[query];
        if (DIRECT) {
          const bool has_sink = dims[8];
          const float sink = has_sink ? sink_logits[kv_head * group + (first_query + query) / q_len] * M_LOG2E_F : 0;
          MergedValue merged;
          merged.begin(found.x, has_sink, sink);
          merged.add(found.x, found.y, value);
          value = merged.result();
        }
        attended[((DIRECT ? query_row : chunk_row) + query) * DV + channel] = Out(value);
        if (channel == 0) {
          stats[2 * (chunk_row + query)] = found.x;
          stats[2 * (chunk_row + query) + 1] = found.y;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
