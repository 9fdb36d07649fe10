//! Exchanges ranges of columns of matrices, on engines with rows and without.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{BlockLens, CopyRange, Group, GroupOptions, Matrix, Rows};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

/// Returns element `at` of a row of the block from one rank to another.
fn element(from: usize, to: usize, row: usize, at: usize) -> u32 {
    (((from * 16 + to) * 1000 + row) * 1000 + at) as u32
}

/// Returns the blocks of `widths`, each with its rank, as a matrix or one after another.
fn laid_out(
    is_matrix: bool,
    rows: usize,
    widths: &[usize],
    of: impl Fn(usize, usize, usize) -> u32,
) -> Vec<u32> {
    let cells = |rank: usize, row| (0..widths[rank]).map(move |at| (rank, row, at));
    let places: Vec<_> = match is_matrix {
        true => (0..rows)
            .flat_map(|row| (0..widths.len()).flat_map(move |rank| cells(rank, row)))
            .collect(),
        false => (0..widths.len())
            .flat_map(|rank| (0..rows).flat_map(move |row| cells(rank, row)))
            .collect(),
    };
    places.into_iter().map(|(rank, row, at)| of(rank, row, at)).collect()
}

fn open(bootstrap: impl Bootstrap + 'static, with_rows: bool) -> Result<Group, Error> {
    let mut options = host::Options::default();
    options.caps.rows = with_rows;
    options.caps.piece_bytes_max = 64;
    let fabric = host::Fabric::open_with(bootstrap.rank(), bootstrap.ranks(), options);
    Group::open(bootstrap, fabric.map_err(|error| Error::of_backend("open the fabric", error))?)
}

const SIDES: [Matrix; 3] = [Matrix::Input, Matrix::Output, Matrix::Both];

#[test]
fn an_all_to_all_exchanges_columns() {
    for (ranks, with_rows) in (1..=5).flat_map(|ranks| [(ranks, true), (ranks, false)]) {
        in_process::run(ranks, |bootstrap| {
            let mut group = open(bootstrap, with_rows)?;
            let me = group.rank().index();
            // The widths of the blocks differ between pairs of ranks; some are 0.
            let width = |from: usize, to: usize| (from * 7 + to * 3 + ranks) % 6;
            let send: Vec<usize> = (0..ranks).map(|to| width(me, to)).collect();
            let receive: Vec<usize> = (0..ranks).map(|from| width(from, me)).collect();
            for (rows, side) in
                [1, 2, 7, 100].into_iter().flat_map(|rows| SIDES.map(|side| (rows, side)))
            {
                let times =
                    |widths: &[usize]| widths.iter().map(|width| width * rows).collect::<Vec<_>>();
                let lens = BlockLens::send_receive(&times(&send), &times(&receive));
                let mut exchange = group.all_to_all::<u32>(lens).matrix(rows, side).prepare()?;
                let of_input = |to, row, at| element(me, to, row, at);
                let of_output = |from, row, at| element(from, me, row, at);
                for _ in 0..2 {
                    let input = laid_out(side != Matrix::Output, rows, &send, of_input);
                    exchange.input_mut()?.copy_from_slice(&input);
                    exchange.run()?;
                    let expected = laid_out(side != Matrix::Input, rows, &receive, of_output);
                    assert_eq!(
                        exchange.output()?,
                        expected,
                        "{rows} rows, {side:?}, {ranks} ranks"
                    );
                }
                assert_eq!(exchange.output_of(Rank(0)).is_err(), side != Matrix::Input);
            }
            group.close()
        })
        .unwrap();
    }
}

#[test]
fn every_algorithm_gathers_columns_in_any_number_of_chunks() {
    for (ranks, with_rows) in (1..=5).flat_map(|ranks| [(ranks, true), (ranks, false)]) {
        in_process::run(ranks, |bootstrap| {
            let mut group = open(bootstrap, with_rows)?;
            let me = group.rank().index();
            let algorithms = [
                Algorithm::Direct,
                Algorithm::Pull,
                Algorithm::Ring,
                Algorithm::DoubleRing,
                Algorithm::GetRing,
            ];
            for (algorithm, chunks) in
                algorithms.into_iter().flat_map(|one| [1, 3, 8].map(|chunks| (one, chunks)))
            {
                for (rows, width) in [(1, 9), (3, 31), (50, 5), (40, 64)] {
                    let gather =
                        group.all_gather::<u32>(rows * width).algorithm(algorithm).chunks(chunks);
                    let mut gather = gather.matrix(rows, Matrix::Output).prepare()?;
                    gather.input_mut()?.copy_from_slice(&laid_out(
                        false,
                        rows,
                        &[width],
                        |_, row, at| element(me, 0, row, at),
                    ));
                    gather.run()?;
                    let of = |from, row, at| element(from, 0, row, at);
                    let expected = laid_out(true, rows, &vec![width; ranks], of);
                    assert_eq!(
                        gather.output()?,
                        expected,
                        "{algorithm}, {chunks} chunks, {rows} x {width}"
                    );
                }
            }
            group.close()
        })
        .unwrap();
    }
}

#[test]
fn what_cannot_be_a_matrix_is_refused() {
    in_process::run(2, |bootstrap| {
        let mut group = open(bootstrap, true)?;
        let mut refusal = |rows, len, resizable: bool| {
            let exchange = group.all_to_all::<u32>(len).matrix(rows, Matrix::Input);
            let exchange = if resizable { exchange.resizable() } else { exchange };
            let error = exchange.prepare().map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert!(refusal(3, 4, false).contains("has 4 elements, expected a multiple of the 3 rows"));
        assert!(refusal(0, 4, false).contains("expected a multiple of the 0 rows"));
        assert!(refusal(2, 4, true).contains("resizable is set, expected it off"));
        let sum = group.all_reduce::<u32>(4).matrix(2, Matrix::Input).prepare().map(drop);
        assert!(sum.unwrap_err().to_string().contains("is a reduction"));
        group.close()
    })
    .unwrap();
}

#[test]
fn windows_copy_columns() {
    for with_rows in [true, false] {
        in_process::run(3, |bootstrap| {
            let mut group = open(bootstrap, with_rows)?;
            let (me, next) = (group.rank().0, Rank((group.rank().0 + 1) % 3));
            let last = Rank((me + 2) % 3);
            let window = group.window::<u32>(300)?;
            let mut channel = group.channel(&window, 2)?;
            let own: Vec<u32> = (0..100).map(|at| 1000 * me + at).collect();
            channel.write(0, &own)?;
            group.barrier()?;
            // Three columns of ten rows, to columns 4 to 6 of a matrix that begins at 100, and one copy beside them.
            let from = Rows { begin: 2, len: 3, stride: 10 };
            let mut copies = from.copies(Rows { begin: 104, ..from }, 10)?;
            copies.push(CopyRange { from: 0, to: 109, len: 1 });
            channel.puts(next, &copies)?;
            channel.signal(next, 0)?;
            channel.wait(last, 0, group.timeout())?;
            channel.gets(last, &from.copies(Rows { begin: 200, len: 3, stride: 3 }, 10)?)?;
            channel.flush(group.timeout())?;
            let mut seen = [0; 200];
            channel.read(100, &mut seen)?;
            let mut expected = [0; 200];
            for (row, at) in (0..10).flat_map(|row| (0..3).map(move |at| (row, at))) {
                let value = 1000 * last.0 + (10 * row + 2 + at) as u32;
                (expected[10 * row + 4 + at], expected[100 + 3 * row + at]) = (value, value);
            }
            expected[9] = 1000 * last.0;
            assert_eq!(seen, expected);
            group.barrier()?;
            drop((channel, window));
            group.close()
        })
        .unwrap();
    }
}

#[test]
fn windows_gathers_and_scatters_have_columns() {
    in_process::run(3, |bootstrap| {
        let mut group = open(bootstrap, true)?;
        let (me, ranks, root) = (group.rank().index(), group.ranks(), Rank(1));
        let (rows, width) = (7, 3);
        let widths = vec![width; ranks];
        let window = group.window::<u32>(200)?;
        let exchange = group.all_to_all::<u32>(rows * width).matrix(rows, Matrix::Both);
        let mut exchange = exchange.input_from(&window, 5).output_into(&window, 101).prepare()?;
        let input = laid_out(true, rows, &widths, |to, row, at| element(me, to, row, at));
        window.slice_mut(5..5 + input.len())?.copy_from_slice(&input);
        exchange.run()?;
        let expected = laid_out(true, rows, &widths, |from, row, at| element(from, me, row, at));
        assert_eq!(*window.slice(101..101 + expected.len())?, expected);
        assert!(exchange.output_memory_of(root).is_err());

        let gather = group.gather::<u32>(root, rows * width).matrix(rows, Matrix::Output);
        let mut gather = gather.prepare()?;
        let own = laid_out(false, rows, &[width], |_, row, at| element(me, 0, row, at));
        gather.input_mut()?.copy_from_slice(&own);
        gather.run()?;
        if group.rank() == root {
            let of = |from, row, at| element(from, 0, row, at);
            assert_eq!(gather.output()?, laid_out(true, rows, &widths, of));
        }
        let scatter = group.scatter::<u32>(root, rows * width).matrix(rows, Matrix::Input);
        let mut scatter = scatter.prepare()?;
        if group.rank() == root {
            let input = laid_out(true, rows, &widths, |to, row, at| element(0, to, row, at));
            scatter.input_mut()?.copy_from_slice(&input);
        }
        scatter.run()?;
        let of = |_, row, at| element(0, me, row, at);
        assert_eq!(scatter.output()?, laid_out(false, rows, &[width], of));
        drop((exchange, window));
        group.close()
    })
    .unwrap();
}

#[test]
fn columns_cross_a_network_whose_engines_have_no_gets() {
    in_process::run(4, |bootstrap| {
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        let fabric = |gets| {
            let mut options = host::Options::default();
            options.caps.gets = gets;
            let fabric = host::Fabric::open_with(rank, ranks, options);
            fabric.map_err(|error| Error::of_backend("open the fabric", error))
        };
        let topology = Topology::by_key([0, 0, 1, 1])?;
        let options = GroupOptions::default().topology(topology);
        let mut group = options.open_tiers(bootstrap, fabric(true)?, fabric(false)?)?;
        let (me, rows, width) = (rank.index(), 9, 11);
        for algorithm in [Algorithm::Pull, Algorithm::Hierarchical] {
            let gather = group.all_gather::<u32>(rows * width).algorithm(algorithm).chunks(3);
            let mut gather = gather.matrix(rows, Matrix::Output).prepare()?;
            let expected = if algorithm == Algorithm::Pull { Algorithm::Direct } else { algorithm };
            assert_eq!(gather.report().algorithm, expected);
            let own = laid_out(false, rows, &[width], |_, row, at| element(me, 0, row, at));
            gather.input_mut()?.copy_from_slice(&own);
            gather.run()?;
            let of = |from, row, at| element(from, 0, row, at);
            assert_eq!(gather.output()?, laid_out(true, rows, &vec![width; ranks], of));
        }
        group.close()
    })
    .unwrap();
}
