//! Tests operations whose element type is chosen at run time.

use peerlane_collectives::collective::Collective;
use peerlane_collectives::element::{DType, Element};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation, Part, UntypedOperation};
use peerlane_hal::{ErrorKind, Rank};

use crate::support::group::in_group;

const RANKS: usize = 3;

/// Adds 1, 2 and 3 of an untyped operation, and compares the bytes with those of a typed one.
fn sums<T: Element + From<u8>>(group: &mut Group) -> Result<(), Error> {
    let mine = T::from(group.rank().0 as u8 + 1);
    let sum = T::from(6);

    let mut typed: Operation<T> = group.all_reduce(5).prepare()?;
    let mut untyped = group.untyped_operation(Collective::AllReduce, T::DTYPE, 5).prepare()?;
    assert_eq!((typed.dtype(), untyped.dtype()), (T::DTYPE, T::DTYPE));

    typed.input_mut()?.fill(mine);
    let bytes: Vec<u8> = bytemuck::bytes_of(&mine).repeat(5);
    assert_eq!(typed.input_bytes_mut()?, bytes);
    untyped.input_bytes_mut()?.copy_from_slice(&bytes);

    // Both have one type now.
    let mut both: [UntypedOperation; 2] = [typed.into_untyped(), untyped];
    for operation in &mut both {
        operation.run()?;
        assert_eq!(operation.output_bytes()?, bytemuck::bytes_of(&sum).repeat(5));
        assert_eq!(operation.output_memory().bytes, 5 * size_of::<T>() as u64);
    }
    Ok(())
}

#[test]
fn types_chosen_at_run_time_are_added_like_typed_ones() {
    in_group(RANKS, |group| {
        sums::<u8>(group)?;
        sums::<i64>(group)?;
        sums::<f32>(group)?;
        sums::<f64>(group)
    });
}

#[test]
fn every_type_moves_with_lengths_and_places_in_its_elements() {
    in_group(RANKS, |group| {
        let me = group.rank();
        let window = group.window::<u8>(1024)?;
        for dtype in DType::ALL {
            let size = dtype.bytes();
            let gather = group.untyped_operation(Collective::AllGather, dtype, 4);
            let gather = gather.output_into(&window.untyped(), 10).in_place();
            let mut gather = gather.resizable().prepare()?;

            for (len, begin) in [(4, 10), (2, 20), (3, 0)] {
                gather.resize(Part::len(len).output(begin))?;
                let block = |rank: Rank| {
                    let first = (begin + rank.index() * len) * size;
                    first..first + len * size
                };
                window.slice_mut(block(me))?.fill(me.0 as u8 + 1);
                gather = gather.into_started()?.wait()?;
                for rank in Rank::all(RANKS) {
                    let received = window.slice(block(rank))?;
                    assert!(received.iter().all(|byte| *byte == rank.0 as u8 + 1), "{dtype}");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn buffers_of_bytes_hold_elements_of_any_type() {
    in_group(RANKS, |group| {
        for dtype in [DType::I8, DType::F16, DType::U64] {
            let bytes = dtype.bytes();
            let mut input = group.allocate::<u8>(2 * bytes)?;
            input.as_mut_slice()?.fill(group.rank().0 as u8);
            let output = group.allocate::<u8>(2 * RANKS * bytes)?;

            let gather = group.untyped_operation(Collective::AllGather, dtype, 2);
            let gather = gather.input(input.into_untyped()).output(output.into_untyped());
            let mut gather = gather.prepare()?;
            gather.run()?;
            let expected = [0, 1, 2].map(|rank| vec![rank; 2 * bytes]).concat();
            assert_eq!(gather.output_bytes()?, expected);
        }
        Ok(())
    });
}

#[test]
fn a_type_or_place_that_does_not_fit_is_refused() {
    in_group(RANKS, |group| {
        // A window of 30 bytes has 7 elements of 4 bytes.
        let window = group.window::<u8>(30)?;
        let broadcast = Collective::Broadcast { root: Rank(0) };
        let broadcast = group.untyped_operation(broadcast, DType::F32, 4).in_place();
        let refused = broadcast.output_into(&window.untyped(), 4).prepare().unwrap_err();
        let expected =
            "the range is 4..8, expected a range within 0..7, the elements of the window";
        assert!(refused.to_string().ends_with(expected), "{refused}");

        // A buffer has exactly the bytes of the output.
        let output = group.allocate::<u8>(31)?.into_untyped();
        let gather = group.untyped_operation(Collective::AllGather, DType::F32, 2);
        let refused = gather.output(output).prepare().unwrap_err();
        let expected = "output has 31 bytes, expected 24 bytes";
        assert!(refused.to_string().ends_with(expected), "{refused}");

        let reduce = group.untyped_operation(Collective::AllReduce, DType::Complex64, 4);
        let refused = reduce.prepare().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);

        // Ranks that choose different types learn of it.
        let dtype = if group.rank() == Rank(1) { DType::I32 } else { DType::F32 };
        let refused = group.untyped_operation(Collective::AllGather, dtype, 4).prepare();
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Mismatch);

        // The bytes of a window are not those of the operation.
        let gather = group.untyped_operation(Collective::AllGather, DType::U16, 1);
        let mut gather = gather.output_into(&window.untyped(), 0).prepare()?;
        assert_eq!(gather.input_bytes_mut()?.len(), 2);
        assert_eq!(gather.output_bytes().unwrap_err().kind(), ErrorKind::InvalidArgument);
        Ok(())
    });
}
