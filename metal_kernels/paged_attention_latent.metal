// Latent attention (MLA, absorbed form) of decode rows and of prefill chunks: every head reads the same keys,
// 512 latent channels and 64 rotary ones, and values are the latent channels again.
//
// Each of the eight simdgroups owns 64 latent and 8 rotary channels: it alone reads them, once, takes its part
// of every score, and accumulates its 64 output channels. Only scores cross simdgroups, through threadgroup
// memory, one barrier for eight positions. Fragments are transposed as in paged_attention_decode.
//
// Queries are numbered position by position, (i, head) -> i Hq + head; query i stands at length - q_len + i.
//
// Template  T float16, bfloat16 or float32; TILES of 8 queries a threadgroup; DIRECT: every row has one chunk,
//           so the result is final; Out: T if DIRECT, else float
// Inputs    query_latent [R, Hq, q_len, 512], query_rope [R, Hq, q_len, 64] T, the latter already scaled
//           pool_latent [N, 1, B, 512], pool_rope [N, 1, B, 64] T; tail_latent, tail_rope [S, 1, tail_len, ..]
//           chunk_latent [n, 512], chunk_rope [n, 64] T: positions from `chunk_start` on
//           tables [R, table_width] int32       row_info [R, 3] int32: slot, flushed, first_block
//           row_length [R] int32                work [W, 2] int32: row, chunk number
//           dims int32: Hq, q_len, log2 B, tail_len, table_width, window, chunk, chunk_start, first i and
//                       number of positions of this launch
//           factors float: scale log2(e)        (metadata is padded to 8 elements or more)
// Outputs   attended, Out: if DIRECT [R, Hq, positions, 512]; else [W, Hq positions, 512], unnormalised
//           stats [W, Hq positions, 2] float: maximum (base 2) and sum
// Grid      (256 query_groups, 1, W) threads, threadgroups of 256

//@body
  constexpr int LATENT = 512, ROPE = 64, SIMDGROUPS = 8;
  constexpr int OWN = LATENT / SIMDGROUPS, OWN_ROPE = ROPE / SIMDGROUPS;
  constexpr int PIECE = 16 / sizeof(T);
  constexpr int K_PIECES = OWN / (4 * PIECE), V_PIECES = OWN / (8 * PIECE);
  constexpr int ROW = (OWN + OWN_ROPE) / PIECE + 1;  // staged token, in pieces; one more, so that banks differ

  const uint lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int thread_index = thread_index_in_threadgroup;
  const int frow = fragment_row(lane);
  const int fcol = fragment_col(lane);

  const int heads = dims[0], q_len = dims[1], block_shift = dims[2], tail_len = dims[3], table_width = dims[4];
  const int window = dims[5], chunk = dims[6], chunk_start = dims[7], first_index = dims[8], num_indices = dims[9];
  const int num_queries = heads * num_indices;
  const int work_index = threadgroup_position_in_grid.z;
  const int row = work[2 * work_index];
  const int slot = row_info[3 * row], flushed = row_info[3 * row + 1], first_block = row_info[3 * row + 2];
  const device int* table = tables + long(row) * table_width;
  const long tail_row = long(slot) * tail_len;

  // The queries of this threadgroup, and the positions that some of them can see, cut to this piece of work.
  const int first_query = 8 * TILES * int(threadgroup_position_in_grid.x);
  const int first_position = row_length[row] - q_len + first_index;
  const int last_query = min(first_query + 8 * TILES, num_queries) - 1;
  const int part_start = work[2 * work_index + 1] * chunk;
  const int begin = max(part_start, max(0, first_position + first_query / heads - window + 1));
  const int end = min(part_start + chunk, first_position + last_query / heads + 1);

  uint4 query_pieces[TILES][K_PIECES];
  float2 query_ropes[TILES];
  int2 newest[TILES];
  float2 best[TILES], total[TILES];
  float2 acc[TILES][V_PIECES * PIECE];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    const int query = first_query + 8 * tile + fcol;
    const bool valid = query < num_queries, next_valid = query + 1 < num_queries;
    const long from = (long(row) * heads + query % heads) * q_len + first_index + query / heads;
    const long next = (long(row) * heads + (query + 1) % heads) * q_len + first_index + (query + 1) / heads;
    UNROLL for (int j = 0; j < K_PIECES; j++) {
      const int channel = OWN * simdgroup + (4 * j + frow / 2) * PIECE + frow % 2;
      query_pieces[tile][j] = interleave(
          query_latent + from * LATENT + channel, query_latent + next * LATENT + channel, valid, next_valid);
    }
    const int rope_channel = OWN_ROPE * simdgroup + frow;
    query_ropes[tile].x = valid ? float(query_rope[from * ROPE + rope_channel]) * M_LOG2E_F : 0;
    query_ropes[tile].y = next_valid ? float(query_rope[next * ROPE + rope_channel]) * M_LOG2E_F : 0;
    newest[tile] = first_position + int2(query / heads, (query + 1) / heads);
    best[tile] = float2(NO_SCORE);
    total[tile] = 0;
    UNROLL for (int i = 0; i < V_PIECES * PIECE; i++) {
      acc[tile][i] = 0;
    }
  }

  threadgroup uint4 staged[SIMDGROUPS][8 * ROW];
  threadgroup float2 score_parts[2][SIMDGROUPS][TILES][32];
  int turn = 0;
  for (int start = begin & ~7; start < end; start += 8) {
    // Eight tokens' own channels, for this simdgroup only.
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int at = lane; at < 8 * (ROW - 1); at += 32) {
      const bool is_latent = at < 8 * OWN / PIECE;
      const int piece = is_latent ? at : at - 8 * OWN / PIECE;
      const int own = is_latent ? OWN : OWN_ROPE;
      const int token = piece / (own / PIECE), channel = piece % (own / PIECE) * PIECE;
      const int position = start + token, width = own * SIMDGROUPS;
      const device T* source = is_latent ? chunk_latent : chunk_rope;
      long source_token = position - chunk_start;
      const bool valid = position >= begin && position < end;
      if (valid && position < chunk_start) {
        const Place place = locate(
            position, flushed, table, first_block, 0, 1, block_shift, tail_row, tail_len);
        source_token = place.token;
        if (place.pooled) {
          source = is_latent ? pool_latent : pool_rope;
        } else {
          source = is_latent ? tail_latent : tail_rope;
        }
      }
      uint4 bits = 0;
      if (valid) {
        bits = load_bits(source + source_token * width + own * simdgroup + channel);
      }
      staged[simdgroup][token * ROW + (is_latent ? 0 : OWN / PIECE) + channel / PIECE] = bits;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    float2 scores[TILES][1];
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      scores[tile][0] = 0;
    }
    UNROLL for (int j = 0; j < K_PIECES; j++) {
      Piece<T> key;
      key.unpack(staged[simdgroup][frow * ROW + 4 * j + fcol / 2]);
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        Piece<T> query;
        query.unpack(query_pieces[tile][j]);
        UNROLL for (int i = 0; i < PIECE / 2; i++) {
          multiply_add(scores[tile][0], key.pair[i], query.pair[i]);
        }
      }
    }
    const threadgroup T* rope = reinterpret_cast<const threadgroup T*>(staged[simdgroup] + frow * ROW) + OWN + fcol;
    const float2 key_rope = float2(float(rope[0]), float(rope[1]));
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      scores[tile][0] *= factors[0];
      multiply_add(scores[tile][0], key_rope, query_ropes[tile]);
      score_parts[turn][simdgroup][tile][lane] = scores[tile][0];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      float2 score = 0;
      UNROLL for (int s = 0; s < SIMDGROUPS; s++) {
        score += score_parts[turn][s][tile][lane];
      }
      scores[tile][0] = visible_score(score, 1, 0, start + frow, newest[tile], window);
      online_softmax(scores[tile], best[tile], total[tile], acc[tile]);
    }
    turn ^= 1;  // the other buffer, so that one barrier is enough

    UNROLL for (int j = 0; j < V_PIECES; j++) {
      Piece<T> value, next;
      value.unpack(staged[simdgroup][fcol * ROW + 8 * j + frow]);
      next.unpack(staged[simdgroup][(fcol + 1) * ROW + 8 * j + frow]);
      UNROLL for (int i = 0; i < PIECE; i++) {
        const float2 pair = float2(value.pair[i / 2][i % 2], next.pair[i / 2][i % 2]);
        UNROLL for (int tile = 0; tile < TILES; tile++) {
          multiply_add(acc[tile][j * PIECE + i], pair, scores[tile][0]);
        }
      }
    }
  }

  UNROLL for (int tile = 0; tile < TILES; tile++) {
    total[tile] = sum_over_rows(total[tile]);
    UNROLL for (int c = 0; c < 2; c++) {
      const int query = first_query + 8 * tile + fcol + c;
      if (query >= num_queries) {
        continue;
      }
      const long index = (query % heads) * num_indices + query / heads;
      const long to = (DIRECT ? row : work_index) * long(num_queries) + index;
      const float sum = total[tile][c];
      const float weight = !DIRECT ? 1 : sum > 0 ? 1 / sum : 0;
      UNROLL for (int j = 0; j < V_PIECES; j++) {
        UNROLL for (int i = 0; i < PIECE; i++) {
          const int channel = OWN * simdgroup + (8 * j + frow) * PIECE + i;
          attended[to * LATENT + channel] = Out(acc[tile][j * PIECE + i][c] * weight);
        }
      }
      if (simdgroup == 0 && frow == 0) {
        const long stat = 2 * (work_index * long(num_queries) + index);
        stats[stat] = best[tile][c];
        stats[stat + 1] = sum;
      }
    }
  }
