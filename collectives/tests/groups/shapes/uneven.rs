//! Tests `all_gather_v`: blocks of different lengths.

use peerlane_collectives::error::Error;
use peerlane_collectives::group::OutputPart;
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::Rank;

use crate::support::ranks::{Host, LENGTHS, check, fill, in_flat_group, in_group};

fn gather(
    group: &mut Host,
    algorithm: Algorithm,
    lens: &[usize],
    chunks: u32,
    in_place: bool,
) -> Result<(), Error> {
    let me = group.rank();
    let builder = group.all_gather::<u8>(lens).algorithm(algorithm).chunks(chunks);
    let mut gather = if in_place { builder.in_place() } else { builder }.prepare()?;
    let report = gather.report();
    let own = lens[me.index()] as u64;
    let (shortest, longest) = (lens.iter().min(), lens.iter().max());
    assert_eq!((report.input_bytes, report.total_bytes), (own, lens.iter().sum::<usize>() as u64));
    assert_eq!(report.shortest_block_bytes, *shortest.unwrap() as u64);
    assert_eq!(report.longest_block_bytes, *longest.unwrap() as u64);
    for start in 0..4 {
        if !in_place {
            gather.output_mut()?.fill(0);
        }
        let input = gather.input_mut()?;
        assert_eq!(input.len(), lens[me.index()]);
        fill(input, me, 0, start);
        gather.run()?;
        let mut end = 0;
        for (rank, &len) in Rank::all(lens.len()).zip(lens) {
            check(&gather.output()?[end..end + len], rank, 0, start);
            let block = gather.output_of(rank)?;
            assert_eq!(block.len(), len);
            check(block, rank, 0, start);
            end += len;
        }
        assert_eq!(gather.output()?.len(), end);
        assert_eq!(gather.output_of(OutputPart::Tensor(0))?.len(), end);
    }
    Ok(())
}

/// Returns lengths in the ratio 1:2:3:4 and so on, of one rank that alone has data, mixed, zero and one.
fn all_lens(ranks: usize) -> Vec<Vec<usize>> {
    let ratio = (1..=ranks).map(|rank| rank * 65).collect();
    let alone = (0..ranks).map(|rank| if rank == ranks / 2 { 129 } else { 0 }).collect();
    let any = (0..ranks).map(|rank| LENGTHS[(rank * 5 + ranks) % LENGTHS.len()]).collect();
    vec![ratio, alone, any, vec![0; ranks], vec![1; ranks]]
}

#[test]
fn every_rank_gets_every_block_of_any_length() {
    for ranks in [1, 2, 3, 4, 5, 7, 9] {
        in_group(ranks, Algorithm::ALL, |group, algorithm| {
            for (index, lens) in all_lens(ranks).iter().enumerate() {
                for in_place in [false, true] {
                    gather(group, algorithm, lens, 1 + index as u32, in_place)?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn elements_larger_than_a_byte_keep_their_order() {
    in_flat_group(4, |group| {
        let (me, lens) = (group.rank().0, [10, 20, 30, 40]);
        let mut gather = group.all_gather::<f64>(&lens).chunks(3).prepare()?;
        gather.input_mut()?.fill(f64::from(me) + 0.5);
        gather.run()?;
        let expected: Vec<f64> =
            (0..4).flat_map(|rank| vec![rank as f64 + 0.5; lens[rank]]).collect();
        assert_eq!(gather.output()?, expected);
        assert_eq!(gather.output_of(Rank(3))?, [3.5; 40]);
        Ok(())
    });
}

#[test]
fn equal_blocks_can_be_read_one_by_one() {
    in_flat_group(3, |group| {
        let me = group.rank();
        let mut gather = group.all_gather::<u8>(65).prepare()?;
        fill(gather.input_mut()?, me, 0, 0);
        gather.run()?;
        (0..3).map(Rank).try_for_each(|rank| {
            check(gather.output_of(rank)?, rank, 0, 0);
            Ok(())
        })
    });
}
