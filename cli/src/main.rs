//! The command `kvrail`.

mod nics;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Moves a KV cache between machines over several RDMA NICs.
#[derive(Debug, Parser)]
#[command(name = "kvrail", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show every RDMA port, whether it becomes a rail, and why not.
    Nics(nics::Args),
}

fn main() -> ExitCode {
    // Bad usage ends here, with status 2 and what is allowed.
    match Cli::parse().command {
        Command::Nics(args) => nics::run(&args),
    }
}
