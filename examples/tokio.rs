//! Waits for operations in tasks of tokio, beside other work of the runtime. Two ranks are threads of this process.
//!
//! `cargo run --example tokio`

use std::time::Duration;

use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Error, Group, host};
use tokio::runtime;

const LEN: usize = 100_000;

async fn serve(mut group: Group) -> Result<(), Error> {
    let rank = group.rank().0;
    let mut weights = group.all_gather::<u32>(LEN).prepare()?;
    let mut tokens = group.all_to_all::<u32>(LEN).prepare()?;
    weights.input_mut()?.fill(rank);
    tokens.input_mut()?.fill(rank);
    // A task owns the operation while it runs.
    let gathering = tokio::spawn(weights.into_started()?);
    // This one is borrowed, and awaited beside something else.
    let exchange = tokens.start()?;
    tokio::time::sleep(Duration::from_millis(1)).await;
    exchange.await?;
    assert_eq!([tokens.output()?[0], tokens.output()?[LEN]], [0, 1]);
    let weights = gathering.await.expect("the task did not panic")?;
    assert_eq!([weights.output()?[0], weights.output()?[LEN]], [0, 1]);
    // The end of the group is a future, too: a server selects it beside its requests.
    let end = group.end()?;
    group.close()?;
    println!("rank {rank}: {}", end.await);
    Ok(())
}

fn main() -> Result<(), Error> {
    in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let group = Group::open(bootstrap, fabric)?;
        let runtime = runtime::Builder::new_current_thread().enable_time().build();
        runtime.expect("a runtime starts").block_on(serve(group))
    })?;
    Ok(())
}

#[test]
fn the_example_runs() {
    main().unwrap();
}
