//! Tests all-gathers of several tensors: several tensors at once, with any placement.

use peerlane_collectives::collective::Collective;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockLens, Operation, OutputPart};
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::Rank;

use crate::support::ranks::{Host, check, fill, in_flat_group, in_group};

/// The lengths of the tensors; one is empty.
const TENSORS: [usize; 5] = [65, 0, 1, 300, 64];

/// The buffers of pieces and tensors.
#[derive(Clone, Copy, Debug)]
enum Placement {
    Contiguous,
    SeparateInputs,
    SeparateOutputs,
    InPlace,
    InPlaceSeparate,
}

const ALL: [Placement; 5] = [
    Placement::Contiguous,
    Placement::SeparateInputs,
    Placement::SeparateOutputs,
    Placement::InPlace,
    Placement::InPlaceSeparate,
];

/// Returns the lengths of all pieces. With `uneven`, rank r has r more elements of each tensor that is not empty.
fn lens(ranks: usize, uneven: bool) -> Vec<Vec<usize>> {
    let of = |len, rank| if uneven && len > 0 { len + rank } else { len };
    TENSORS.iter().map(|&len| (0..ranks).map(|rank| of(len, rank)).collect()).collect()
}

fn prepare(
    group: &mut Host,
    algorithm: Algorithm,
    uneven: bool,
    (chunks, outputs): (u32, u32),
    placement: Placement,
) -> Result<Operation<u8>, Error> {
    let (me, lens) = (group.rank().index(), lens(group.ranks(), uneven));
    let allocate = |lens: Vec<usize>| {
        lens.into_iter().map(|len| group.allocate::<u8>(len)).collect::<Result<Vec<_>, _>>()
    };
    let pieces = allocate(lens.iter().map(|lens| lens[me]).collect())?;
    let wholes = allocate(lens.iter().map(|lens| lens.iter().sum()).collect())?;
    let builder = match uneven {
        true => group.all_gather::<u8>(BlockLens::tensors(&lens)),
        false => group.all_gather::<u8>(BlockLens::tensors(TENSORS)),
    };
    // The default depends on whether Peerlane allocates the outputs, which is not the same on all ranks.
    let builder = builder.algorithm(algorithm).chunks(chunks).outputs(outputs);
    match placement {
        Placement::Contiguous => builder,
        Placement::SeparateInputs => builder.input_buffers(pieces),
        Placement::SeparateOutputs => builder.output_buffers(wholes),
        Placement::InPlace => builder.in_place(),
        Placement::InPlaceSeparate => builder.in_place().output_buffers(wholes),
    }
    .prepare()
}

fn gather(
    group: &mut Host,
    algorithm: Algorithm,
    uneven: bool,
    (chunks, outputs): (u32, u32),
    placement: Placement,
) -> Result<(), Error> {
    let me = group.rank();
    let mut gather = prepare(group, algorithm, uneven, (chunks, outputs), placement)?;
    let lens = lens(group.ranks(), uneven);
    for start in 0..3 {
        for (tensor, lens) in lens.iter().enumerate() {
            let piece = gather.input_piece_mut(tensor)?;
            assert_eq!(piece.len(), lens[me.index()]);
            fill(piece, me, tensor, start);
        }
        gather.run()?;
        for (tensor, lens) in lens.iter().enumerate() {
            let whole = gather.output_of(OutputPart::Tensor(tensor))?.to_vec();
            assert_eq!(whole.len(), lens.iter().sum::<usize>());
            let mut end = 0;
            for (rank, &len) in Rank::all(lens.len()).zip(lens) {
                check(&whole[end..end + len], rank, tensor, start);
                assert_eq!(
                    gather.output_of(OutputPart::Piece { tensor, rank })?,
                    &whole[end..end + len],
                    "{placement:?}"
                );
                end += len;
            }
        }
    }
    Ok(())
}

#[test]
fn each_tensor_is_gathered_with_every_placement() {
    for ranks in [1, 2, 3, 4, 5, 7, 9] {
        in_group(ranks, Algorithm::ALL, |group, algorithm| {
            for placement in ALL {
                gather(group, algorithm, false, (1, 1), placement)?;
                gather(group, algorithm, true, (3, 1), placement)?;
            }
            gather(group, algorithm, true, (2, 2), Placement::Contiguous)?;
            gather(group, algorithm, true, (2, 2), Placement::SeparateInputs)
        });
    }
}

#[test]
fn ranks_may_have_different_placements() {
    in_group(3, Algorithm::ALL, |group, algorithm| {
        let placement = ALL[group.rank().index()];
        gather(group, algorithm, true, (2, 1), placement)
    });
}

/// Rank 0 provides no block, but its outputs have all tensors.
#[test]
fn tensors_of_any_root_are_found() {
    in_flat_group(3, |group| {
        let rank = group.rank();
        for root in Rank::all(3) {
            let lens = BlockLens::tensors([3, 5]);
            let mut broadcast =
                group.operation::<u8>(Collective::Broadcast { root }, lens).prepare()?;
            if rank == root {
                broadcast.input_mut()?.copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
            }
            broadcast.run()?;
            assert_eq!(broadcast.output_of(OutputPart::Tensor(0))?, [1, 2, 3]);
            assert_eq!(broadcast.output_of(OutputPart::Tensor(1))?, [4, 5, 6, 7, 8]);
        }
        Ok(())
    });
}

#[test]
fn contiguous_tensors_follow_each_other() {
    in_flat_group(2, |group| {
        let me = group.rank().0;
        let mut gather = group.all_gather::<i32>(BlockLens::tensors([1, 2])).prepare()?;
        let input = gather.input_mut()?;
        input.copy_from_slice(&[1, 20, 21].map(|value| value + 100 * me as i32));
        gather.run()?;
        assert_eq!(gather.output()?, [1, 101, 20, 21, 120, 121]);
        assert_eq!(gather.output_of(OutputPart::Tensor(1))?, [20, 21, 120, 121]);
        assert_eq!(gather.output_of(OutputPart::Piece { tensor: 1, rank: Rank(1) })?, [120, 121]);
        let error = gather.output_of(Rank(1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a block consists of 2 pieces, one of each tensor; use `OutputPart::Piece` for each piece"
        );
        Ok(())
    });
}

#[test]
fn an_input_in_pieces_has_no_single_range() {
    in_flat_group(2, |group| {
        let lens = || BlockLens::tensors([1, 2]);
        let mut gather = group.all_gather::<i32>(lens()).in_place().prepare()?;
        let error = gather.input_memory().unwrap_err();
        assert_eq!(
            error.to_string(),
            "the input consists of 2 pieces, one of each tensor; use `input_piece_mut` or `input_piece_memory` for each \
             piece"
        );
        for tensor in 0..2 {
            let piece = gather.input_piece_memory(tensor)?;
            let slice = gather.input_piece_mut(tensor)?;
            assert_eq!(piece.base.as_ptr(), slice.as_mut_ptr().cast());
            assert_eq!(piece.bytes, size_of_val(slice) as u64);
        }
        assert!(gather.input_piece_memory(2).is_err());
        let joined = group.all_gather::<i32>(lens()).prepare()?;
        assert_eq!(joined.input_memory()?.bytes, 12);
        Ok(())
    });
}
