//! Tests the kernels for reductions on the simulated driver: when they are refused, and how many blocks run them.

use peerlane_cuda::{Error, Fabric, Options};
use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind, Fabric as _, Rank, Reducer};

use crate::support::{connected, driver, soon};

fn reducer(options: Options) -> Result<Option<Reducer>, Error> {
    let open = |rank: Rank| Fabric::open_with(rank, 1, options.clone());
    connected(1, soon, open)?[0].engine(Default::default())?.prepare_reduce()
}

#[test]
fn refused_kernels_are_an_error_and_blocks_are_bounded() {
    let (driver, _turn) = driver();
    driver.set("PTX", "refused");
    let error = reducer(Options::default()).unwrap_err();
    driver.set("PTX", "accepted");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    let expected = [
        "the driver does not accept the kernels for reductions on device 0",
        "CUDA_ERROR_INVALID_PTX",
        "(ptxas fatal: unsupported version)",
        "compute capability 7.0 or newer",
    ];
    assert!(expected.iter().all(|part| text.contains(part)), "{text}");

    let all = reducer(Options::default()).unwrap().expect("the kernels are accepted");
    assert!(all.blocks > 8 && all.threads == 512, "{all:?}");
    let few = Options { reduce_blocks: Some(8), ..Options::default() };
    let few = reducer(few).unwrap().expect("the kernels are accepted");
    assert_eq!(few.to_string(), "8 blocks of 512 threads");
    let none = Options { reduce_blocks: Some(0), ..Options::default() };
    assert_eq!(reducer(none).unwrap().map(|reducer| reducer.blocks), Some(1));
}
