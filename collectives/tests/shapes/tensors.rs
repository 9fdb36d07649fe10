//! `all_gather_tensors`: several tensors at once, each to its own place.

use peerlane_collectives::error::Error;
use peerlane_collectives::group::AllGather;
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::Rank;

use crate::ranks::{Host, check, fill, in_flat_group, in_group};

/// Tensors of unlike lengths, an empty one among them.
const TENSORS: [usize; 5] = [65, 0, 1, 300, 64];

/// Where the pieces and the tensors lie.
#[derive(Clone, Copy, Debug)]
enum Places {
    Joined,
    InputsApart,
    OutputsApart,
    InPlace,
    InPlaceApart,
}

const ALL: [Places; 5] = [
    Places::Joined,
    Places::InputsApart,
    Places::OutputsApart,
    Places::InPlace,
    Places::InPlaceApart,
];

/// Uneven pieces where `uneven`: rank r has r more of each tensor but the empty one.
fn lens(ranks: usize, uneven: bool) -> Vec<Vec<usize>> {
    let of = |len, rank| if uneven && len > 0 { len + rank } else { len };
    TENSORS.iter().map(|&len| (0..ranks).map(|rank| of(len, rank)).collect()).collect()
}

fn prepare(
    group: &mut Host,
    algorithm: Algorithm,
    uneven: bool,
    (chunks, outputs): (u32, u32),
    places: Places,
) -> Result<AllGather<u8>, Error> {
    let (me, lens) = (group.rank().index(), lens(group.ranks(), uneven));
    let allocate = |lens: Vec<usize>| {
        lens.into_iter().map(|len| group.allocate::<u8>(len)).collect::<Result<Vec<_>, _>>()
    };
    let pieces = allocate(lens.iter().map(|lens| lens[me]).collect())?;
    let wholes = allocate(lens.iter().map(|lens| lens.iter().sum()).collect())?;
    let slices: Vec<&[usize]> = lens.iter().map(Vec::as_slice).collect();
    let builder = match uneven {
        true => group.all_gather_tensors_v::<u8>(&slices),
        false => group.all_gather_tensors::<u8>(&TENSORS),
    };
    // Two in turn are the default only where Peerlane allocates them, which not all ranks let it.
    let builder = builder.algorithm(algorithm).chunks(chunks).outputs(outputs);
    match places {
        Places::Joined => builder,
        Places::InputsApart => builder.input_buffers(pieces),
        Places::OutputsApart => builder.output_buffers(wholes),
        Places::InPlace => builder.in_place(),
        Places::InPlaceApart => builder.in_place().output_buffers(wholes),
    }
    .prepare()
}

fn gather(
    group: &mut Host,
    algorithm: Algorithm,
    uneven: bool,
    (chunks, outputs): (u32, u32),
    places: Places,
) -> Result<(), Error> {
    let me = group.rank();
    let mut gather = prepare(group, algorithm, uneven, (chunks, outputs), places)?;
    let lens = lens(group.ranks(), uneven);
    for start in 0..3 {
        for (tensor, lens) in lens.iter().enumerate() {
            let piece = gather.input_piece_mut(tensor)?;
            assert_eq!(piece.len(), lens[me.index()]);
            fill(piece, me, tensor, start);
        }
        gather.run()?;
        for (tensor, lens) in lens.iter().enumerate() {
            let whole = gather.tensor(tensor)?.to_vec();
            assert_eq!(whole.len(), lens.iter().sum::<usize>());
            let mut end = 0;
            for (rank, &len) in Rank::all(lens.len()).zip(lens) {
                check(&whole[end..end + len], rank, tensor, start);
                assert_eq!(gather.piece(tensor, rank)?, &whole[end..end + len], "{places:?}");
                end += len;
            }
        }
    }
    Ok(())
}

#[test]
fn each_tensor_is_gathered_to_its_own_place() {
    for ranks in 1..=9 {
        in_group(ranks, |group, algorithm| {
            for places in ALL {
                gather(group, algorithm, false, (1, 1), places)?;
                gather(group, algorithm, true, (3, 1), places)?;
            }
            gather(group, algorithm, true, (2, 2), Places::Joined)?;
            gather(group, algorithm, true, (2, 2), Places::InputsApart)
        });
    }
}

#[test]
fn ranks_may_keep_their_tensors_in_unlike_ways() {
    in_group(3, |group, algorithm| {
        let places = ALL[group.rank().index()];
        gather(group, algorithm, true, (2, 1), places)
    });
}

#[test]
fn joined_tensors_lie_one_after_another() {
    in_flat_group(2, |group| {
        let me = group.rank().0;
        let mut gather = group.all_gather_tensors::<i32>(&[1, 2]).prepare()?;
        let input = gather.input_mut()?;
        input.copy_from_slice(&[1, 20, 21].map(|value| value + 100 * me as i32));
        gather.run()?;
        assert_eq!(gather.output()?, [1, 101, 20, 21, 120, 121]);
        assert_eq!(gather.tensor(1)?, [20, 21, 120, 121]);
        assert_eq!(gather.piece(1, Rank(1))?, [120, 121]);
        let error = gather.shard(Rank(1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a shard is a piece of each of 2 tensors; take it by `piece`"
        );
        Ok(())
    });
}
