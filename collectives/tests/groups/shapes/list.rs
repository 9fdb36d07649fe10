//! Tests destinations: every rank has destinations of its own, in any order and with gaps.

use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Destination, OutputPart};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::Rank;

use crate::support::ranks::{Host, LENGTHS, UNTOUCHED, check, fill, in_flat_group, in_group};

/// Returns destinations in `buffers` buffers, in random order with gaps, and the length of each buffer.
fn scattered(lens: &[usize], buffers: usize, seed: u64) -> (Vec<Destination>, Vec<usize>) {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut order: Vec<usize> = (0..lens.len()).collect();
    rng.shuffle(&mut order);
    let mut ends = vec![0; buffers];
    let mut destinations = vec![Destination::default(); lens.len()];
    for block in order {
        let buffer = rng.usize(..buffers);
        let offset = ends[buffer] + rng.usize(..20);
        ends[buffer] = offset + lens[block];
        destinations[block] = Destination { buffer, offset };
    }
    ends.iter_mut().for_each(|end| *end += rng.usize(..20));
    (destinations, ends)
}

fn gather(
    group: &mut Host,
    algorithm: Algorithm,
    lens: &[usize],
    chunks: u32,
    in_place: bool,
) -> Result<(), Error> {
    let me = group.rank();
    let buffers = 1 + me.index() % 3;
    let (destinations, buffer_lens) = scattered(lens, buffers, 1000 + u64::from(me.0));
    let mut outputs = Vec::new();
    for len in &buffer_lens {
        let mut buffer = group.allocate::<u8>(*len)?;
        buffer.as_mut_slice()?.fill(UNTOUCHED);
        outputs.push(buffer);
    }
    let builder = group.all_gather::<u8>(lens).destinations(&destinations);
    let builder = builder.algorithm(algorithm).chunks(chunks);
    let builder = builder.output_buffers(outputs);
    let mut gather = if in_place { builder.in_place() } else { builder }.prepare()?;
    for start in 0..3 {
        fill(gather.input_mut()?, me, 0, start);
        gather.run()?;
        let mut gathered = 0;
        for (rank, &len) in Rank::all(lens.len()).zip(lens) {
            let block = gather.output_of(rank)?;
            assert_eq!(block.len(), len);
            check(block, rank, 0, start);
            gathered += len;
        }
        let mut untouched = 0;
        for (buffer, len) in buffer_lens.iter().enumerate() {
            let bytes = gather.output_of(OutputPart::Buffer(buffer))?;
            assert_eq!(bytes.len(), *len);
            untouched += bytes.iter().filter(|byte| **byte == UNTOUCHED).count();
        }
        assert_eq!(untouched, buffer_lens.iter().sum::<usize>() - gathered, "gaps");
    }
    Ok(())
}

#[test]
fn every_block_is_copied_to_its_destination_and_gaps_stay_untouched() {
    for ranks in [1, 2, 3, 4, 5, 7, 9] {
        in_group(ranks, Algorithm::ALL, |group, algorithm| {
            for round in 0..3 {
                let lens: Vec<usize> =
                    (0..ranks).map(|rank| LENGTHS[(rank * 5 + round) % LENGTHS.len()]).collect();
                gather(group, algorithm, &lens, 1 + round as u32, false)?;
                gather(group, algorithm, &lens, 1 + round as u32, true)?;
            }
            Ok(())
        });
    }
}

#[test]
fn allocated_buffers_have_the_smallest_length() {
    in_flat_group(2, |group| {
        let me = group.rank();
        let to = |buffer, offset| Destination { buffer, offset };
        let destinations = if me == Rank(0) { [to(1, 3), to(0, 0)] } else { [to(0, 0), to(0, 4)] };
        let mut gather = group.all_gather::<f32>(&[4, 2]).destinations(&destinations).prepare()?;
        gather.input_mut()?.fill(me.0 as f32 + 1.0);
        gather.run()?;
        let blocks = (gather.output_of(Rank(0))?, gather.output_of(Rank(1))?);
        assert_eq!(blocks, (&[1.0; 4][..], &[2.0; 2][..]));
        if me == Rank(0) {
            assert_eq!(gather.output_of(OutputPart::Buffer(0))?, [2.0; 2]);
            assert_eq!(
                gather.output_of(OutputPart::Buffer(1))?,
                [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
            );
            let error = gather.output().unwrap_err();
            assert_eq!(
                error.to_string(),
                "the output consists of 2 buffers; use `output_of` for one of them, a tensor or a block"
            );
        } else {
            assert_eq!(gather.output()?, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]);
        }
        Ok(())
    });
}
