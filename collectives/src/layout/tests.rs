//! Cells tile shards, spans tile cells, and every byte comes where it belongs, whatever the places.

use std::collections::BTreeMap;

use insta::assert_snapshot;

use super::*;

fn check_tiling(layout: &Layout, context: &str) {
    let mut output_end = 0;
    for shard in Rank::all(layout.ranks()) {
        let mut input_end = 0;
        for chunk in 0..layout.chunks() {
            let span = layout.cell(Cell { shard, chunk });
            let place = (span.input_offset, span.output_offset);
            assert_eq!(place, (input_end, output_end), "{context}, cell {shard}.{chunk}");
            if span.input_offset < layout.shard_bytes(shard) {
                assert_eq!(span.input_offset % CHUNK_ALIGN_BYTES, 0, "{context}, {shard}.{chunk}");
            }
            input_end += span.bytes;
            output_end += span.bytes;
        }
        assert_eq!(input_end, layout.shard_bytes(shard), "{context}, shard {shard}");
    }
    assert_eq!(output_end, layout.total_bytes(), "{context}");
}

#[test]
fn cells_tile_the_output_exactly() {
    for seed in 0..500 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let ranks = rng.usize(1..=9);
        let chunks = rng.u32(1..=17);
        let around = [0, 1, 3, 63, 64, 65, 4095, 4096, 4097, 1 << 33];
        let shard_bytes: Vec<u64> = (0..ranks)
            .map(|_| if rng.bool() { *rng.choice(&around).unwrap() } else { rng.u64(..10_000) })
            .collect();
        let layout = Layout::new(&shard_bytes, chunks).unwrap();
        check_tiling(&layout, &format!("seed {seed}, shards {shard_bytes:?}, {chunks} chunks"));
    }
}

#[test]
fn the_largest_shard_and_the_most_chunks_do_not_overflow() {
    let layout = Layout::new(&[u64::MAX], u32::MAX).unwrap();
    let last = layout.cell(Cell { shard: Rank(0), chunk: u32::MAX - 1 });
    assert_eq!(last.input_offset + last.bytes, u64::MAX);
}

#[test]
fn chunks_are_even_to_one_unit() {
    let layout = Layout::new(&[10 * 64], 4).unwrap();
    let bytes = |chunk| layout.cell(Cell { shard: Rank(0), chunk }).bytes;
    assert_eq!([bytes(0), bytes(1), bytes(2), bytes(3)], [128, 192, 128, 192]);
}

#[test]
fn impossible_layouts_are_named() {
    let text = |shard_bytes: &[u64], chunks| {
        let error = Layout::new(shard_bytes, chunks).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    assert_snapshot!(text(&[], 1), @"shard_bytes is empty, expected one length for every rank");
    assert_snapshot!(text(&[8], 0), @"chunks is 0, expected at least 1");
    assert_snapshot!(text(&[1, u64::MAX], 1), @"shard_bytes of rank 1 is 18446744073709551615, behind 1 bytes of the ranks before it; expected a sum of at most 18446744073709551615");
}

/// A layout with random tensors and, on each rank, random places; shuffled, with gaps between.
fn random_layout(rng: &mut fastrand::Rng) -> Layout {
    let (ranks, chunks) = (rng.usize(1..=6), rng.u32(1..=5));
    let tensors = rng.usize(1..=4);
    let around = [0, 1, 3, 63, 64, 65, 127, 200];
    let lengths = |rng: &mut fastrand::Rng| match rng.bool() {
        true => Lengths::equal(ranks, *rng.choice(&around).unwrap()),
        false => {
            let bytes: Vec<u64> = (0..ranks).map(|_| *rng.choice(&around).unwrap()).collect();
            Lengths::of(&bytes)
        }
    };
    let lengths = (0..tensors).map(|_| lengths(rng).unwrap()).collect();
    let layout = Layout::of_tensors(lengths, chunks).unwrap();
    if rng.bool() {
        return layout;
    }
    let places = Rank::all(ranks).map(|rank| {
        let pieces: Vec<u64> = (0..tensors).map(|t| layout.piece_bytes(t, rank)).collect();
        let wholes: Vec<u64> = (0..tensors).map(|t| layout.tensor_bytes(t)).collect();
        let shards: Vec<u64> = layout.shards().iter().collect();
        let joined = Spot { buffer: rng.u32(..3), offset: rng.u64(..100) };
        let input = match rng.bool() {
            true => InputPlaces::Joined(joined),
            false => InputPlaces::ByTensor(scatter(rng, &pieces)),
        };
        let output = match (rng.u32(..3), tensors) {
            (0, _) => OutputPlaces::Joined(joined),
            (1, 1) => OutputPlaces::ByShard(scatter(rng, &shards)),
            _ => OutputPlaces::ByTensor(scatter(rng, &wholes)),
        };
        Places { input, output }
    });
    let places = places.collect();
    layout.with_places(places).unwrap()
}

/// Spots for runs of bytes, in any order, in up to three buffers.
fn scatter(rng: &mut fastrand::Rng, bytes: &[u64]) -> Vec<Spot> {
    let mut order: Vec<usize> = (0..bytes.len()).collect();
    rng.shuffle(&mut order);
    let mut ends = [0; 3];
    let mut spots = vec![Spot::default(); bytes.len()];
    for index in order {
        let buffer = rng.usize(..3);
        let offset = ends[buffer] + rng.u64(..20);
        ends[buffer] = offset + bytes[index];
        spots[index] = Spot { buffer: buffer as u32, offset };
    }
    spots
}

/// Buffers as long as they must be: by number, each byte with what it holds.
type Memory = BTreeMap<u32, Vec<u32>>;

fn zeroed(needs: BTreeMap<u32, u64>) -> Memory {
    needs.into_iter().map(|(buffer, bytes)| (buffer, vec![0; bytes as usize])).collect()
}

fn bytes_at(spot: Spot, bytes: u64) -> Range<usize> {
    spot.offset as usize..(spot.offset + bytes) as usize
}

/// What byte `index` of a rank's piece of a tensor holds; never 0.
fn content(rank: Rank, tensor: usize, index: u64) -> u32 {
    1 + index as u32 + 1000 * (tensor as u32 + 10 * rank.0)
}

/// Moves one cell; a byte that is written twice is a fault.
fn copy(spans: impl Iterator<Item = Span>, from: &Memory, into: &mut Memory, context: &str) {
    for Span { src, dst, bytes } in spans {
        assert!(bytes > 0, "{context}");
        let read = &from[&src.buffer][bytes_at(src, bytes)];
        let written = &mut into.get_mut(&dst.buffer).unwrap()[bytes_at(dst, bytes)];
        assert!(written.iter().all(|byte| *byte == 0), "{context}: written twice");
        written.copy_from_slice(read);
    }
}

fn all_cells(layout: &Layout) -> impl Iterator<Item = Cell> {
    let chunks = layout.chunks();
    Rank::all(layout.ranks())
        .flat_map(move |shard| (0..chunks).map(move |chunk| Cell { shard, chunk }))
}

/// Every byte of every output is what the definition says, and the gaps are untouched.
fn check_output(layout: &Layout, rank: Rank, output: &Memory, context: &str) {
    let mut seen = 0;
    for tensor in 0..layout.tensors() {
        for shard in Rank::all(layout.ranks()) {
            let bytes = layout.piece_bytes(tensor, shard);
            let spot = layout.output_spot(rank, tensor, shard);
            let wanted = (0..bytes).map(|index| content(shard, tensor, index));
            if bytes > 0 {
                let held = output[&spot.buffer][bytes_at(spot, bytes)].iter().copied();
                assert!(held.eq(wanted), "{context}: tensor {tensor}, shard {shard}");
            }
            seen += bytes as usize;
        }
    }
    let written = output.values().flatten().filter(|byte| **byte != 0).count();
    assert_eq!(written, seen, "{context}: bytes beside the output");
}

#[test]
fn every_byte_comes_where_it_belongs_from_inputs_and_from_outputs() {
    for seed in 0..500 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let layout = random_layout(&mut rng);
        let context = format!("seed {seed}, {layout:?}");
        let inputs: Vec<Memory> = Rank::all(layout.ranks())
            .map(|rank| {
                let mut input = zeroed(layout.places(rank).input_needs(&layout, rank));
                let mut before = 0;
                for tensor in 0..layout.tensors() {
                    let bytes = layout.piece_bytes(tensor, rank);
                    let spot = layout.input_spot(rank, tensor, before);
                    before += bytes;
                    for index in 0..bytes {
                        let buffer = input.get_mut(&spot.buffer).unwrap();
                        buffer[(spot.offset + index) as usize] = content(rank, tensor, index);
                    }
                }
                input
            })
            .collect();
        let outputs: Vec<Memory> = Rank::all(layout.ranks())
            .map(|rank| zeroed(layout.places(rank).output_needs(&layout)))
            .collect();
        let mut first = outputs[0].clone();
        for cell in all_cells(&layout) {
            let spans = layout.spans(cell, (cell.shard, Source::Input), Rank(0));
            copy(spans, &inputs[cell.shard.index()], &mut first, &context);
        }
        check_output(&layout, Rank(0), &first, &context);
        for (rank, mut output) in Rank::all(layout.ranks()).zip(outputs) {
            for cell in all_cells(&layout) {
                let spans = layout.spans(cell, (Rank(0), Source::Output), rank);
                copy(spans, &first, &mut output, &context);
            }
            check_output(&layout, rank, &output, &context);
        }
    }
}

#[test]
fn many_ranks_cost_little() {
    let layout = Layout::of_tensors(vec![Lengths::equal(16_384, 1 << 20).unwrap()], 64).unwrap();
    assert_eq!((layout.places.len(), layout.ranks()), (1, 16_384));
    let layout = layout.with_places(vec![Places::JOINED; 16_384]).unwrap();
    assert_eq!(layout.places.len(), 1);
    let cell = Cell { shard: Rank(16_383), chunk: 63 };
    let spans: Vec<_> = layout.spans(cell, (cell.shard, Source::Input), Rank(5)).collect();
    let spot = |offset| Spot { buffer: 0, offset };
    let bytes = 1 << 14;
    let (src, dst) = (spot((1 << 20) - bytes), spot((1 << 34) - bytes));
    assert_eq!(spans, [Span { src, dst, bytes }]);
}

#[test]
fn impossible_places_are_named() {
    let layout = Layout::new(&[8, 0, 16], 1).unwrap();
    let spot = |buffer, offset| Spot { buffer, offset };
    let text = |layout: &Layout, output| {
        let places = Places { output, ..Places::JOINED };
        let error = places.check(layout, Rank(1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    let by_shard = |spots: &[Spot]| OutputPlaces::ByShard(spots.to_vec());
    assert_snapshot!(text(&layout, by_shard(&[spot(0, 0)])), @"the output has 1 spots, expected one for each of 3 shards");
    assert_snapshot!(text(&layout, OutputPlaces::ByTensor(Vec::new())), @"the output has 0 spots, expected one for each of 1 tensors");
    assert_snapshot!(text(&layout, by_shard(&[spot(1, 9), spot(1, 10), spot(1, 0)])), @"outputs of rank 1 overlap: shard 2 is bytes 0 to 16 of buffer 1 and shard 0 is bytes 9 to 17 of buffer 1");
    assert_snapshot!(text(&layout, by_shard(&[spot(0, u64::MAX), spot(1, 0), spot(2, 0)])), @"the output of rank 1: shard 0 has 8 bytes from byte 18446744073709551615 of buffer 0 on, expected an end of at most 18446744073709551615");
    let shards = [spot(0, 16), spot(0, 3), spot(0, 0)];
    let places = Places { output: by_shard(&shards), ..Places::JOINED };
    places.check(&layout, Rank(0)).unwrap();
    let two = vec![Lengths::equal(3, 8).unwrap(); 2];
    let two = Layout::of_tensors(two, 1).unwrap();
    assert_snapshot!(text(&two, by_shard(&shards)), @"tensors is 2, expected 1 where each shard has a spot");
    let error = two.with_places(vec![Places::JOINED]).unwrap_err();
    assert_snapshot!(error, @"places of 1 ranks, expected 3");
}
