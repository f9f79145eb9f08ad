from hf_paged.sweep.run import main

main()
