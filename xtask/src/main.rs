//! Generators and checks: `cargo xtask <task>`. What they write is in git, so a user's build never
//! runs them.

use std::process::ExitCode;

use xtask::verbs::Made;
use xtask::{drift, header, pkgconfig, root, symbols, verbs, write, Failure};

const USAGE: &str = "usage: cargo xtask <task>
  header                     write include/kvrail.h from ffi/src
  symbols                    write ffi/symbols.txt, the exported names
  verbs                      write ffi/verbs-sys/src/types_*.rs from the headers of rdma-core 44
  check                      fail when one of them differs from what is in git
  pkgconfig --prefix DIR     print kvrail.pc for an installation under DIR (an absolute path)";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[&str]) -> Result<(), Failure> {
    let root = root();
    match args {
        ["header"] => write(&root.join(header::PATH), &header::generate(&root)?),
        ["symbols"] => write(&root.join(symbols::PATH), &symbols::from_header(&root)?),
        ["verbs"] => {
            for target in &verbs::TARGETS {
                match verbs::generate(&root, target)? {
                    Made::Text(text) => write(&root.join(target.path), &text)?,
                    Made::Skipped(why) => return Err(Failure(format!("cannot write {why}"))),
                }
            }
            Ok(())
        }
        ["check"] => drift(&root),
        ["pkgconfig", "--prefix", prefix] => {
            print!("{}", pkgconfig::generate(&root, prefix)?);
            Ok(())
        }
        _ => Err(Failure(format!("unknown arguments {args:?}\n{USAGE}"))),
    }
}
