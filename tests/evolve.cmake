# The tests of the search itself; those of its gates are in CMakeLists.txt. Included by it.
test_program(unit_evolve unit 120)
target_link_libraries(unit_evolve PRIVATE acromion_workbench)
