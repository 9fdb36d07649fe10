//! Runs ranks as threads in one group over the host backend.

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::element::Element;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, OperationBuilder, Window};
use peerlane_host as host;

/// Runs `body` on each rank of a group, closes the group, and returns what the ranks have returned.
pub(crate) fn in_group<R: Send>(
    ranks: usize,
    body: impl Fn(&mut Group) -> Result<R, Error> + Sync,
) -> Vec<R> {
    let results = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let result = body(&mut group)?;
        group.close()?;
        Ok(result)
    });
    results.unwrap()
}

/// Places an operation in two windows, for its input and its output, or in buffers of its own.
pub(crate) fn placed<'g, T: Element>(
    builder: OperationBuilder<'g, T>,
    windows: Option<[&Window<T>; 2]>,
    in_place: bool,
) -> OperationBuilder<'g, T> {
    let builder = if in_place { builder.in_place() } else { builder };
    match windows {
        None => builder,
        Some([_, output]) if in_place => builder.output_into(output, 0),
        Some([input, output]) => builder.output_into(output, 0).input_from(input, 0),
    }
}
